"""From the window's account to causes: which place divided once too often, or not at all.

A term's gradient scale is ``G = r * sum w N``. It factors into a part that belongs to the ranks (``r``, the count's
reach over ranks, the user's own ``n``) and one that belongs to accumulation (the framework's ``K``, the user's own
``K``, the count's reach over the window). Each part must be 1 by itself; each that is not is a cause of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from torch import Tensor

from accum_plugin.ledger import Totals
from accum_plugin.normalization import TermView, close, product
from accum_plugin.rules import scale as rules
from accum_plugin.rules.base import Rule


@dataclasses.dataclass(frozen=True)
class Cause:
    """One reason why a term's gradient scale is off."""

    rule: type[Rule]
    factor: float | None
    seen: str
    certainty: str = "certain"
    evidence: str = "graph"
    remedy: str | None = None
    term: str = ""


@dataclasses.dataclass(frozen=True)
class Window:
    """What diagnosis needs to know about the window, the same on every rank.

    Args:
        microbatches: Mean number of microbatches per rank, ``m``.
        steps: Microbatches in a whole window, ``K``.
        num_ranks: Data-parallel ranks, ``n``.
        reduction: Factor that ranks are combined with, ``r``, as measured or as documented.
        signalled: Whether the framework told microbatches apart (else undivided sums are only suspected).
        normalization: What the user declared: ``"auto"``, ``"mean"`` or ``"sum"``.
        divider: Who divides for the framework, in words.
        evidence: What ``reduction`` rests on, for findings about ranks.
        passes: Backward passes in this rank's window, where they are what a loss may be divided by; else 0.
    """

    microbatches: float
    steps: int
    num_ranks: int
    reduction: float
    signalled: bool = True
    normalization: str = "auto"
    divider: str = "the framework"
    evidence: str = "graph"
    passes: int = 0


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What became of one term.

    Args:
        scale: Gradient seen over gradient meant; ``None`` where that cannot be said.
        causes: Why ``scale`` is not 1.
        target: What ``r * applied`` should be after correction; ``None``: nothing to correct towards.
        counted: Loose multipliers that turned out to be counts (indices), to be remembered.
        coefficient: Product of the loose multipliers of a sum that are coefficients.
        whole: Whether the divisor of a sum proved to be the count of a whole window of several microbatches.
    """

    scale: float | None
    causes: tuple[Cause, ...] = ()
    target: float | None = 1.0
    counted: tuple[int, ...] = ()
    coefficient: float = 1.0
    whole: bool = False


def judge(
    view: TermView,
    totals: Totals,
    window: Window,
    remembered: tuple[int, ...] | None = None,
    *,
    whole: bool = False,
) -> Judgement:
    """Say by which factor a term's gradient is off, and why.

    Args:
        view: The term as this rank's latest microbatch showed it.
        totals: The term's account over all ranks, host numbers.
        window: The window.
        remembered: Loose multipliers that balanced an earlier window, if any.
        whole: Whether a sum's divisor was the count of a whole window before; with one microbatch nothing else tells.
    """
    if view.kind in ("coupled", "penalty") or not totals.units:
        return Judgement(None, target=None)
    if view.kind == "mean":
        return _judge_mean(view, totals, window, remembered)
    return _judge_sum(view, totals, window, whole)


def _judge_mean(view: TermView, totals: Totals, window: Window, remembered: tuple[int, ...] | None) -> Judgement:
    if window.normalization == "sum":
        return _declared(window.reduction * totals.weighted / totals.units, view, window, totals.units)
    if view.steps == 1 and window.steps == window.num_ranks and view.ranks_power < 0:
        # K shows only now, and is equal to n: the division is for accumulation as likely as for the ranks.
        user_power = view.user_power + view.ranks_power
        view = dataclasses.replace(view, steps=window.steps, user_power=user_power, ranks_power=0)
    scale = window.reduction * totals.weighted
    for subset in _subsets(len(view.loose)):
        if close(scale * _of(view, subset), 1.0):
            return Judgement(1.0, () if subset else _written_as_float(view, window), counted=subset)
    subset = remembered or ()
    scale *= _of(view, subset)
    ranks = window.reduction * window.num_ranks * float(window.num_ranks) ** view.ranks_power
    divisions = _divisions(view) + len(subset)
    causes = [*_rank_causes(ranks, view, window), *_step_causes(scale / ranks, divisions, view, window)]
    return Judgement(scale, tuple(causes), counted=subset)


def _judge_sum(view: TermView, totals: Totals, window: Window, whole: bool) -> Judgement:
    total = window.reduction * totals.weighted
    indices = range(len(view.loose))
    for ratio in view.unit_ratios:
        for subset in _subsets(len(view.loose)):
            if close(total * ratio / _of(view, subset), 1.0) and window.normalization != "sum":
                return Judgement(
                    1.0, counted=tuple(i for i in indices if i not in subset), coefficient=_of(view, subset)
                )
    if window.normalization == "mean":
        return _declared(total / float(product(view.loose)), view, window, 1.0)
    found = _reach(view, totals, window, whole)
    if found is None and _is_plain(view):
        return _plain_sum(view, totals, window)
    if found is None or window.normalization == "sum":
        return Judgement(None, target=None)  # a constant normalizer is a choice
    reach, coefficient, ratio = found
    n, m = window.num_ranks, window.microbatches
    over_ranks, over_window = reach in ("window", "step"), reach in ("window", "rank")
    ranks = window.reduction * (1 if over_ranks else n) * float(n) ** view.ranks_power
    steps = total * ratio / coefficient / ranks
    divisions = _divisions(view)
    causes = [
        *_rank_causes(ranks, view, window),
        *_step_causes(steps, divisions + (1 if over_window else 0), view, window, whole=over_window),
    ]
    return Judgement(ranks * steps, tuple(causes), coefficient=coefficient / ratio, whole=over_window and m > 1)


def _plain_sum(view: TermView, totals: Totals, window: Window) -> Judgement:
    factor = window.reduction * view.counted
    if close(factor, 1.0):
        return Judgement(1.0, target=None)
    by = " and ".join(
        [f"{window.num_ranks} ranks (the wrapper averages)"] * (not close(window.reduction, 1.0))
        + [f"{window.steps} accumulation steps ({window.divider})"] * (not close(view.counted, 1.0))
    )
    declared = window.normalization == "sum"
    cause = Cause(
        rules.SumLossAveraged,
        factor,
        f"the loss is a sum over examples, and its gradient is divided by {by}: {_times(factor)} the sum.",
        certainty="certain" if declared else "suspected",
        evidence="declared" if declared else "graph",
        term=view.key,
    )
    target = totals.units * float(product(view.loose)) if declared else None
    return Judgement(factor, (cause,), target=target)


def _declared(factor: float, view: TermView, window: Window, target: float) -> Judgement:
    if close(factor, 1.0):
        return Judgement(1.0, target=target)
    cause = Cause(
        rules.UnexplainedScale,
        factor,
        f"normalization={window.normalization!r} was declared, and the gradient is {_times(factor)} that.",
        evidence="declared",
        term=view.key,
    )
    return Judgement(factor, (cause,), target=target, coefficient=float(product(view.loose)) if target == 1.0 else 1.0)


def _reach(view: TermView, totals: Totals, window: Window, whole: bool) -> tuple[str, float, float] | None:
    """Recognize a divisor as a count: of the whole window, a microbatch step, a rank, or one microbatch."""
    n, m = window.num_ranks, window.microbatches
    by_window, by_microbatch = {"window": 1.0, "rank": float(n)}, {"own": n * m, "step": m}
    reaches = by_microbatch | by_window if m == 1 < window.steps and not whole else by_window | by_microbatch
    for subset in _subsets(len(view.loose)):
        if len(subset) == len(view.loose):
            continue
        for ratio in view.unit_ratios:
            shares = totals.weighted / view.counted * ratio / _of(view, subset)
            for reach, expected in reaches.items():
                if close(shares, expected):
                    return reach, _of(view, subset), ratio
    return None


def _rank_causes(factor: float, view: TermView, window: Window) -> Iterator[Cause]:
    n = window.num_ranks
    if close(factor, 1.0):
        return
    if factor < 1:
        rule = rules.GlobalMeanAveraged
        if view.kind == "mean":
            seen = f"each rank's mean loss is divided by the {n} ranks, and the gradients are averaged over them again"
        else:
            seen = (
                f"the loss is divided by the count of all {n} ranks together, and the gradients are averaged over them"
            )
    else:
        rule = rules.LocalMeanSummed
        what = "multiplied by the number of ranks" if view.ranks_power > 0 else "added up over the ranks, never divided"
        seen = f"each of the {n} ranks takes the mean over its own examples, and the gradients are {what}"
    seen = f"{seen}: they are {_times(factor)} what was meant."
    yield Cause(rule, factor, seen, evidence=window.evidence, term=view.key)


def _step_causes(factor: float, divisions: int, view: TermView, window: Window, whole: bool = False) -> Iterator[Cause]:
    """Causes on the accumulation side; ``factor`` is ``m / K**divisions`` for a count of one microbatch."""
    if close(factor, 1.0):
        return
    steps, m = window.steps, window.microbatches
    certain = "certain" if window.signalled else "suspected"
    if divisions >= 2 and steps > 1:
        extra = float(steps) ** (1 - divisions)
        who = [window.divider] * (view.framework != 1.0) + ["the user's code"] * (-view.user_power)
        who += ["the count of the whole window"] * whole
        seen = f"the loss is divided for accumulation {_count(divisions)}, by {' and by '.join(who) or 'the user'}"
        yield Cause(
            rules.AccumulationDividedTwice,
            extra,
            f"{seen} (K = {steps}): gradients are {_times(extra)} what was meant.",
            term=view.key,
        )
        factor /= extra
        divisions = 1
        if close(factor, 1.0):
            return
    if divisions == 1 and m < steps:
        yield Cause(
            rules.PartialWindow,
            m / steps,
            f"a window of {_microbatches(m)} is divided by {steps}: its gradient is {_times(m / steps)} what was "
            "meant.",
            evidence="measured",
            term=view.key,
        )
        factor *= steps / m
    if close(factor, 1.0):
        return
    if factor > 1:
        yield Cause(
            rules.AccumulationNotDivided,
            factor,
            f"the mean losses of {m:g} microbatches are added up and not divided: gradients are {_times(factor)} "
            "what was meant.",
            certainty=certain,
            term=view.key,
        )
    else:
        yield Cause(
            rules.UnequalMicrobatches if steps > 1 else rules.UnequalRanks,
            factor,
            f"microbatches without a single valid unit count as whole ones: the gradient is {_times(factor)} "
            "what was meant.",
            evidence="measured",
            term=view.key,
        )


def _written_as_float(view: TermView, window: Window) -> tuple[Cause, ...]:
    """A division by a float equal to ``K`` where the framework divides by ``K``; 2 is too common a coefficient."""
    steps = window.steps
    like = [x for x in view.loose if not isinstance(x, Tensor) and close(x, 1.0 / steps)]
    if view.framework == 1.0 or steps < 3 or not view.normalized or not like:
        return ()
    seen = (
        f"the loss is divided by {float(steps)} in the user's code, and by K = {steps} by {window.divider}: if the "
        f"first stands for accumulation, gradients are {_times(1.0 / steps)} what was meant."
    )
    remedy = "Return the undivided loss; where the division is a coefficient, write it as a multiplication."
    return (
        Cause(rules.AccumulationDividedTwice, 1.0 / steps, seen, certainty="suspected", remedy=remedy, term=view.key),
    )


def _divisions(view: TermView) -> int:
    """How often the loss was divided by ``K``."""
    return (1 if view.framework != 1.0 else 0) - view.user_power


def _is_plain(view: TermView) -> bool:
    """Whether a sum carries no normalizer, at most a coefficient of ordinary size."""
    return (
        not view.normalized
        and not any(isinstance(x, Tensor) for x in view.loose)
        and 0.1 <= float(product(view.loose)) <= 10.0
    )


def _subsets(size: int) -> Iterator[tuple[int, ...]]:
    """Subsets of up to six loose multipliers, the smallest first."""
    size = min(size, 6)
    for length in range(size + 1):
        yield from itertools.combinations(range(size), length)


def _of(view: TermView, subset: tuple[int, ...]) -> float:
    result = 1.0
    for index in subset:
        if index < len(view.loose):
            result *= float(view.loose[index])
    return result or 1.0


def _times(factor: float) -> str:
    return f"{factor:.2f} times" if factor >= 1 else f"{1 / factor:.2f} times smaller than"


def _microbatches(number: float) -> str:
    return "1 microbatch" if number == 1 else f"{number:g} microbatches"


def _count(number: int) -> str:
    return {2: "twice"}.get(number, f"{number} times")
