"""Settings that contradict accumulation, told before the first microbatch."""

from __future__ import annotations

from typing import Any

from accum_plugin.finding import Finding
from accum_plugin.rules.boundary import StepEveryMicrobatch
from accum_plugin.rules.scale import UnknownReduction


def static_graph(steps: int, divider: str) -> Finding:
    """Word DDP's ``static_graph=True`` together with accumulation (L14)."""
    seen = f"DistributedDataParallel(static_graph=True) is combined with {steps} accumulation steps ({divider})."
    return UnknownReduction.finding(
        seen,
        evidence="configuration",
        why=(
            "A static graph must reduce in the first iteration, which runs under no_sync() here: the reducer stops "
            "with expect_autograd_hooks_ INTERNAL ASSERT FAILED."
        ),
        remedy="Leave static_graph at False, or accumulate over 1 step.",
        cause="static_graph",
    )


def has_static_graph(models: list[Any]) -> bool:
    """Whether a model is wrapped by DDP with a static graph."""
    return any(getattr(model, "static_graph", False) for model in models)


def deepspeed_steps(plugin: Any) -> int | None:
    """``gradient_accumulation_steps`` of a DeepSpeed configuration; ``None`` where it is left to the framework.

    Args:
        plugin: Accelerate's ``DeepSpeedPlugin``, a DeepSpeed configuration dict, or ``None``.
    """
    config = plugin if isinstance(plugin, dict) else getattr(plugin, "deepspeed_config", None)
    value = (config or {}).get("gradient_accumulation_steps")
    return value if isinstance(value, int) else None


def engine_disagrees(engine_steps: int, steps: int, divider: str) -> Finding:
    """Word a DeepSpeed engine that accumulates over another number of steps than the framework (A15)."""
    seen = (
        f"the DeepSpeed configuration says gradient_accumulation_steps={engine_steps}, {divider} says {steps}: "
        f"the engine divides by {engine_steps} and steps every {engine_steps} microbatches."
    )
    return StepEveryMicrobatch.finding(
        seen,
        evidence="configuration",
        why="The two disagree about where the window ends, so the effective batch is not the one that was configured.",
        remedy=(
            f'Set both to the same number, or "gradient_accumulation_steps": "auto" in the DeepSpeed configuration '
            f"to take {steps}."
        ),
        cause="engine",
    )
