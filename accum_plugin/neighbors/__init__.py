"""The neighbors of the gradient: clipping, fp16 scaling, schedulers, samplers, statistics, resumes, who steps."""

from __future__ import annotations

from accum_plugin.neighbors.base import Clip
from accum_plugin.neighbors.lengths import Run
from accum_plugin.neighbors.observer import Neighbors
from accum_plugin.neighbors.samplers import Padding
from accum_plugin.neighbors.schedulers import Schedule
from accum_plugin.neighbors.stepping import Announcement

__all__ = ["Announcement", "Clip", "Neighbors", "Padding", "Run", "Schedule"]
