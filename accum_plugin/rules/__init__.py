"""The rules: one module per family, one class per code; importing this package registers them all."""

from __future__ import annotations

from accum_plugin.rules import boundary, data, objective, plugin, scale
from accum_plugin.rules.base import RULES, Rule

__all__ = ["RULES", "Rule", "boundary", "data", "objective", "plugin", "scale"]
