"""Wrappers that shard parameters: no rank sees whole local gradients, so what they divide by is read, not measured."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def sharded_units(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module that FSDP shards on its own, of either version."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(kind for name in ("FSDPModule", "FullyShardedDataParallel") if (kind := getattr(fsdp, name, None)))
    return [module for model in models for module in model.modules() if isinstance(module, kinds)] if kinds else []


def divide_factors(units: Iterable[nn.Module]) -> set[float | None]:
    """What the units divide gradients by, as set with ``set_gradient_divide_factor``; ``None``: by the ranks.

    FSDP has no public way to ask; where its internals are not as expected, nothing is taken to be set.
    """
    return {getattr(group, "gradient_divide_factor", None) for unit in units for group in _groups(unit)}


def add_up(units: Iterable[nn.Module]) -> None:
    """Make FSDP2 units add gradients up instead of averaging them."""
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        if any(parameter.device.type == "cpu" for parameter in unit.parameters()):
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no scaled sum


def _groups(unit: nn.Module) -> list[Any]:
    """The unit's parameters as FSDP2 groups them; none where it holds none itself."""
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.6 to 2.12
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
