"""The verdict on one window: causes, the factor that puts the gradient right, and what to remember."""

from __future__ import annotations

import dataclasses
import math

from accum_plugin.correction import escaped
from accum_plugin.diagnosis import Cause, Judgement, Window, judge
from accum_plugin.exchange import Sums
from accum_plugin.finding import FindingLog
from accum_plugin.ledger import Ledger, Totals
from accum_plugin.measurement import Measurement, measure
from accum_plugin.normalization import TermView
from accum_plugin.reduction import Reduction
from accum_plugin.rules import scale as rules

EXACT = 1e-9  # a boundary factor nearer to 1 than this is left alone
_HALF_EPSILON = 2.0**-9  # what a hook that sends bfloat16 rounds by


class Judge:
    """Judges windows, and remembers what earlier ones have shown.

    Args:
        reduction: How ranks are combined.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._measured: float | None = None
        self._counted: dict[tuple[str, int], tuple[int, ...]] = {}
        self._whole: set[tuple[str, int]] = set()
        self._unclear: set[tuple[str, int]] = set()

    # -- how ranks are combined -------------------------------------------------------------------------------------

    def measure(self, sums: Sums, epsilon: float) -> Measurement:
        """Compare what stands in the gradients with what was contributed.

        Args:
            sums: The numbers of all ranks.
            epsilon: Rounding unit of the gradients.
        """
        if not sums.comparable:
            return Measurement(None, True, True, math.inf)
        if self._reduction.compresses and not self._reduction.custom_hook:
            epsilon = max(epsilon, _HALF_EPSILON)
        ranks = self._reduction.num_ranks
        return measure(sums.contributions, sums.gradients, sums.square_sum, sums.magnitude, ranks, epsilon)

    def reduction_factor(self, measured: Measurement) -> float:
        """``r``: measured where it could be, else as it was before, else as the wrapper documents it."""
        snapped = measured.snap(self._candidates)
        if snapped is not None:
            self._measured = snapped
        elif measured.ratio is not None and measured.scalar:
            return measured.ratio
        return self._known if self._measured is None else self._measured

    @property
    def _candidates(self) -> list[float]:
        return [1.0 / self._reduction.num_ranks, 1.0]

    @property
    def _known(self) -> float:
        expected = self._reduction.expected
        return 1.0 / self._reduction.num_ranks if expected is None else expected

    # -- the main term ----------------------------------------------------------------------------------------------

    def judge(self, view: TermView, totals: Totals, facts: Window, measured: Measurement) -> Judgement:
        """Say by which factor the main term's gradient is off, and why."""
        memory = (view.key, len(view.loose))
        if facts.passes == facts.num_ranks and view.ranks_power < 0 and view.steps == 1:
            self._unclear.add(memory)  # divided by the ranks, or by the backward passes of a window that is one batch
        if memory in self._unclear:
            return Judgement(None, target=None)
        judgement = judge(view, totals, facts, self._counted.get(memory), whole=memory in self._whole)
        by_hand = measured.snap(self._candidates) is None and facts.reduction != self._known
        if judgement.scale != 1.0 and by_hand:
            judgement = _judge_scaled_by_hand(view, totals, facts, self._known)
        if judgement.whole:
            self._whole.add(memory)
        if judgement.scale == 1.0 and not judgement.causes:
            self._counted[memory] = judgement.counted
        return judgement


def _judge_scaled_by_hand(view: TermView, totals: Totals, facts: Window, known: float) -> Judgement:
    """Judge a window whose gradients were multiplied after backward: a power of ``K`` is about accumulation."""
    base = dataclasses.replace(facts, reduction=known)
    for power in (-1, 1):
        factor = float(facts.steps) ** power
        if facts.steps > 1 and math.isclose(facts.reduction / known, factor, rel_tol=1e-4):
            scaled = dataclasses.replace(view, user_power=view.user_power + power, base=view.base / factor)
            moved = Totals(totals.units, totals.weighted * factor, totals.squares * factor**2, totals.applied * factor)
            return judge(scaled, moved, base)
    return judge(view, totals, base)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one window has shown.

    Args:
        facts: The window over all ranks.
        judgement: What became of the main term.
        totals: The account of every term.
        causes: What the gradients and the auxiliary terms show.
        uneven: Causes for units that weigh unequally; ``{spread}`` in them stands for by how much.
    """

    facts: Window
    judgement: Judgement
    totals: dict[str, Totals]
    causes: list[Cause]
    uneven: list[Cause]

    def heeded(self, log: FindingLog) -> list[Cause]:
        """Every cause that the user does not ignore."""
        return [c for c in (*self.causes, *self.uneven, *self.judgement.causes) if not log.ignores(c.rule.code)]

    def worded(self, spread: float | None) -> list[Cause]:
        """Every cause, with the spread filled in; where several multiply, each says what they come to together."""
        much = "more" if spread is None else f"{spread:.2f} times as much"
        uneven = [dataclasses.replace(cause, seen=cause.seen.format(spread=much)) for cause in self.uneven]
        causes = [*self.causes, *uneven, *self.judgement.causes]
        return with_product(causes, self.judgement)


def uneven_causes(view: TermView, totals: Totals, sums: Sums, judgement: Judgement, mixed: bool) -> list[Cause]:
    """Causes for weights that differ: short microbatches, short ranks, a divisor that is not the same on all.

    Args:
        view: The main term.
        totals: Its account.
        sums: The numbers of all ranks.
        judgement: What became of it; the divisor of a sum is a count where there is something to correct towards.
        mixed: Whether terms of the loss count different units.
    """
    if totals.even:
        return []
    if view.kind != "mean":
        rule, who = (rules.UnequalMicrobatches, "microbatches") if sums.uneven_within else (rules.UnequalRanks, "ranks")
        seen = (
            f"the count that the loss is divided by differs between {who}: a unit counts up to {{spread}} as another."
        )
        return [Cause(rule, None, seen)] if view.kind == "sum" and view.loose and judgement.target is not None else []
    said = "a unit in the smallest microbatch counts {spread} as one in the largest"
    if mixed and sums.microbatches > sums.num_ranks:
        said += (
            "; the other terms of this loss count other units, and keep their size only up to the change of the totals"
        )
    causes = []
    if sums.uneven_within:
        causes.append(
            Cause(
                rules.UnequalMicrobatches, None, f"microbatches of one window hold different numbers of units: {said}."
            )
        )
    if sums.num_ranks > 1 and sums.uneven_ranks(totals.units):
        causes.append(Cause(rules.UnequalRanks, None, f"ranks hold different numbers of units: {said}."))
    return causes


def escaped_causes(ledger: Ledger, main: TermView) -> list[Cause]:
    """Causes for auxiliary terms that lack a division which the main term gets."""
    causes = []
    for key, account in ledger.accounts.items():
        factor = escaped(account.view, main) if account.view.kind == "mean" else 1.0
        enough = account.view.framework != 1.0 and main.user_power < 0  # the framework has divided it
        if factor != 1.0 and not enough:
            seen = f"a term of the loss ({account.view.label}) escapes the division that the main term gets"
            rule = rules.AccumulationNotDivided if main.user_power else rules.LocalMeanSummed
            causes.append(Cause(rule, 1.0 / factor, f"{seen}: it weighs {1 / factor:.2f} times too much.", term=key))
    return causes


def boundary_factor(
    view: TermView, totals: Totals, judgement: Judgement, reduction: float, causes: list[Cause]
) -> float:
    """What every gradient has to be multiplied by so that each unit weighs ``1 / N`` (or 1, for a declared sum).

    Args:
        view: The main term.
        totals: Its account, with what was applied before backward.
        judgement: What it should come to.
        reduction: ``r``.
        causes: Everything found; only what is certain is corrected.
    """
    if not totals.applied:
        return 1.0
    if judgement.target is None or not correctable(causes):
        factor = totals.weighted / totals.applied  # what scaling microbatches did to the sum is taken back
    else:
        factor = (
            judgement.target * judgement.coefficient / (reduction * totals.applied * counted_product(view, judgement))
        )
    return 1.0 if abs(factor - 1.0) < EXACT else factor


def correctable(causes: list[Cause]) -> bool:
    """Whether something is certainly wrong, and nothing stands in the way of putting it right."""
    blocked = any(cause.rule in (rules.RanksDiverge, rules.UnknownReduction) for cause in causes)
    return not blocked and any(cause.certainty == "certain" for cause in causes)


def counted_product(view: TermView, judgement: Judgement) -> float:
    """Product of a mean's loose multipliers that turned out to be counts (a sum's are part of its weight)."""
    if view.kind != "mean":
        return 1.0
    return math.prod(float(view.loose[index]) for index in judgement.counted)


def own_divisions(view: TermView | None, judgement: Judgement) -> float:
    """What the user's own code multiplies the main term by on account of ``K`` and ``n``."""
    if view is None or view.kind != "mean":
        return 1.0
    return view.counted / view.framework * counted_product(view, judgement)


def with_product(causes: list[Cause], judgement: Judgement) -> list[Cause]:
    """Where several causes multiply, let each say what they come to together."""
    if len(judgement.causes) < 2:
        return causes
    product = math.prod(cause.factor for cause in judgement.causes if cause.factor is not None)
    together = f" All causes together: {product:.4g} times."
    return [dataclasses.replace(c, seen=c.seen + together) if c in judgement.causes else c for c in causes]
