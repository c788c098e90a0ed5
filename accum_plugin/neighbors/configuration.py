"""Settings that contradict accumulation, told before the first microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accum_plugin.finding import Finding
from accum_plugin.rules.boundary import StepEveryMicrobatch
from accum_plugin.rules.scale import UnknownReduction

if TYPE_CHECKING:
    from accum_plugin.reduction import Reduction


def contradictions(models: list[Any], reduction: Reduction, steps: int, divider: str) -> Iterator[Finding]:
    """Yield what the wrappers' settings get wrong.

    Args:
        models: As wrapped.
        reduction: How ranks are combined.
        steps: ``K``.
        divider: Who divides for accumulation, in words.
    """
    if steps > 1 and any(getattr(model, "static_graph", False) for model in models):
        yield static_graph(steps, divider)
    if len(reduction.divide_factors) > 1:
        yield mixed_divide_factors(reduction.divide_factors)


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


def mixed_divide_factors(factors: set[float | None]) -> Finding:
    """Word FSDP2 units that divide their gradients differently: one model, updated with several scales."""
    said = ", ".join(sorted("the number of ranks" if factor is None else f"{factor:g}" for factor in factors))
    return UnknownReduction.finding(
        f"FSDP units of one model divide their gradients differently: by {said}.",
        evidence="configuration",
        why="The parameters of some units get larger gradients than those of others, and no single factor is right.",
        remedy="Call set_gradient_divide_factor() with the same factor on every FSDPModule, the root included.",
        cause="divide_factors",
    )


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
