"""What the gradient account says beyond a factor: cleared, stale, diverging or compounding gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accum_plugin.diagnosis import Cause, Window
from accum_plugin.measurement import Measurement
from accum_plugin.normalization import close
from accum_plugin.reduction import Reduction
from accum_plugin.rules import boundary as boundary_rules
from accum_plugin.rules import scale as rules

if TYPE_CHECKING:
    from accum_plugin.window import OptimizerWindow


def gradient_causes(window: OptimizerWindow, measured: Measurement, facts: Window, reduction: Reduction) -> list[Cause]:
    """Causes that the followed gradient elements show, the gravest first.

    Args:
        window: The optimizer's window on this rank.
        measured: ``.grad`` against the contributions.
        facts: The window over all ranks.
        reduction: How ranks are combined.
    """
    causes = _lost(window) + _stale(window)
    if causes:
        return causes
    if facts.num_ranks > 1 and not measured.agree:
        return [_diverge(facts, reduction)]
    if facts.num_ranks > 1 and measured.ratio is not None:
        return _unknown(window, measured, facts, reduction)
    return []


def spoiled(window: OptimizerWindow) -> bool:
    """Whether this rank's gradients are not what its books say: some were lost, or strange ones are among them."""
    return window.carries_over or bool(_lost(window) or _stale(window))


def _lost(window: OptimizerWindow) -> list[Cause]:
    lost = {entry.microbatch for entry in window.lost}
    if not lost:
        return []
    kept = window.microbatches
    total = len(lost | {entry.microbatch for entry in window.backwards})
    return [
        Cause(
            boundary_rules.GradientsClearedInWindow,
            kept / total,
            f"gradients were cleared inside the window: {kept} of {total} microbatches reach the optimizer, the others "
            "are lost.",
            evidence="measured",
        )
    ]


def _stale(window: OptimizerWindow) -> list[Cause]:
    foreign = [entry for entry in window.backwards if entry.consumed]
    own = {entry.signature for entry in window.backwards if not entry.consumed}
    mixed = [entry for entry in foreign if own and entry.signature not in own]
    if not mixed and not window.sentinel.stale:
        return []
    seen = (
        "another loss, whose optimizer has stepped already, left its gradients in this optimizer's parameters, and "
        "they were not cleared before this window."
        if mixed
        else "gradients of an earlier optimizer step were still there when the window began, and were added to."
    )
    return [Cause(boundary_rules.GradientsClearedInWindow, None, seen, evidence="measured", remedy=_CLEAR)]


_CLEAR = "Call zero_grad() on this optimizer after its step and before its own first backward pass."


def _diverge(facts: Window, reduction: Reduction) -> Cause:
    wrapped = bool(reduction.wrappers)
    return Cause(
        rules.RanksDiverge,
        None,
        f"the {facts.num_ranks} data-parallel ranks are about to step with different gradients: they were never "
        "combined.",
        certainty="certain" if wrapped else "suspected",
        evidence="measured",
    )


def _unknown(window: OptimizerWindow, measured: Measurement, facts: Window, reduction: Reduction) -> list[Cause]:
    n = facts.num_ranks
    if measured.snap([1.0 / n, 1.0]) is not None:
        return []
    compounds = reduction.custom_hook or not reduction.wrappers  # averaging what is averaged already changes nothing
    if compounds and window.sentinel.reduced_midway and facts.microbatches > 1:
        seen = (
            "gradients are combined over ranks at every microbatch and added up without dividing, so earlier "
            "microbatches are counted again each time: the sum compounds."
        )
        return [Cause(rules.UnknownReduction, None, seen, evidence="measured")]
    if not measured.scalar:
        seen = "what stands in the gradients is not one multiple of what the ranks contributed."
        certain = "suspected" if reduction.custom_hook else "info"
        return [Cause(rules.UnknownReduction, None, seen, certainty=certain, evidence="measured")]
    factor = (measured.ratio or 0.0) * n
    known_scaling = any(close(abs(factor), float(facts.steps) ** p) for p in (-1, 1))
    if not reduction.custom_hook or known_scaling:
        return []  # DDP averages; the rest is the user's own scaling, judged with the loss
    seen = f"ranks are combined with a factor of {measured.ratio:.4g}, neither a sum (1) nor a mean ({1 / n:.4g})."
    return [Cause(rules.UnknownReduction, factor, seen, certainty="suspected", evidence="measured")]
