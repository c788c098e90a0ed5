"""Who divides: sort the scalars on a loss term's path into the framework's, the user's and mere coefficients."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from accum_plugin.loss_graph import Number, Scale, Term

TOLERANCE = 1e-5  # relative; counts read from float32 tensors carry 6e-8, wrong factors are off by more than 1e-4


def close(a: float, b: float) -> bool:
    """Whether two factors are the same number up to the rounding of a float32 computation."""
    return math.isclose(a, b, rel_tol=TOLERANCE)


@dataclasses.dataclass(slots=True)
class TermView:
    """One term of one microbatch's loss, with every scalar on its path given a role.

    The weight of one unit is ``base * framework * n**ranks_power * K**user_power * product(loose)``; ``loose`` holds
    what may be a coefficient or a count that only the window's totals can recognize.

    Args:
        key: Identity of the term.
        kind: ``"mean"`` (divided by its own count), ``"sum"``, ``"penalty"`` or ``"coupled"``.
        num_units: Units in this microbatch.
        base: ``1 / num_units`` for a mean, 1 for a sum.
        steps: ``K`` as the framework or the run has it, 1 where nothing accumulates.
        framework: ``1 / K`` where the framework divided, else 1.
        user_power: Power of ``K`` that the user's own code multiplied by (-1: divided once).
        ranks_power: Power of ``n`` that the user's own code multiplied by.
        loose: Other multipliers, by size.
        unit_ratios: Other candidate counts over ``num_units``.
        label: Short name of the reduction, for messages.
        num_ranks: ``n``, data-parallel ranks.
        normalized: Whether a divisor of 2 or more is among ``loose``: someone chose a normalizer.
        counts: Whether a divisor of a sum may be a count that goes beyond this microbatch.
    """

    key: str
    kind: str
    num_units: Number
    base: Number
    steps: int
    framework: float
    user_power: int
    ranks_power: int
    loose: tuple[Number, ...]
    unit_ratios: tuple[float, ...]
    label: str
    num_ranks: int
    normalized: bool = False
    counts: bool = False

    @property
    def counted(self) -> float:
        """Product of the multipliers whose role is known."""
        return self.framework * float(self.steps) ** self.user_power * float(self.num_ranks) ** self.ranks_power

    @property
    def structure(self) -> str:
        """Everything that a verdict depends on, but for sizes: equal on ranks that come to the same one."""
        return f"{self.kind} {self.steps} {self.framework} {self.user_power} {self.ranks_power} {len(self.loose)}"

    @property
    def weight(self) -> Number:
        """Weight of one unit: without loose multipliers for a mean (coefficients), with them for a sum (counts)."""
        weight = self.base * self.counted
        return weight if self.kind != "sum" else weight * product(self.loose)

    def redeclare(self, num_units: Number) -> None:
        """Take the user's word for the number of units of a mean."""
        if self.kind == "mean":
            self.num_units, self.base = num_units, _inverse(num_units)


def declared_view(num_units: Number, normalization: str, context: dict[str, int]) -> TermView:
    """View of a loss that cannot be read, from what the user declared: its units, and mean or sum."""
    divisor = context["framework_divisor"]
    mean = normalization != "sum"
    return TermView(
        key="declared",
        kind="mean" if mean else "sum",
        num_units=num_units,
        base=_inverse(num_units) if mean else 1.0,
        steps=context["steps"],
        framework=1.0 / divisor,
        user_power=0,
        ranks_power=0,
        loose=(),
        unit_ratios=(1.0,),
        label="declared",
        num_ranks=context["num_ranks"],
    )


def product(numbers: tuple[Number, ...]) -> Number:
    """Multiply numbers, host or device; 1.0 for none."""
    result: Number = 1.0
    for number in numbers:
        result = result * number
    return result


@dataclasses.dataclass
class Divisors:
    """What earlier microbatches have shown about the divisors of each term.

    Args:
        own: Which divisor proved to be the term's own count.
        others: Divisors that proved to be something else, whatever they are equal to now.
        values: The value of each divisor of a sum, and ``K`` at the time.
        varied: Divisors that changed while ``K`` did not: counts, whatever they are equal to now.
        first: The value of each divisor of a sum at first, and the examples of that microbatch.
    """

    own: dict[str, int] = dataclasses.field(default_factory=dict)
    others: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    values: dict[tuple[str, int], tuple[int, Number]] = dataclasses.field(default_factory=dict)
    varied: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    first: dict[tuple[str, int], tuple[float, float]] = dataclasses.field(default_factory=dict)

    def varies(self, key: str, place: int, scale: Scale, steps: int) -> bool:
        """Whether the divisor at ``place`` has had another value before, with the same ``K``."""
        if not isinstance(scale.value, Tensor):
            known = self.values.setdefault((key, place), (steps, scale.value))
            if known[0] != steps:
                self.values[key, place] = (steps, scale.value)
            elif known[1] != scale.value:
                self.varied.add((key, place))
        return (key, place) in self.varied

    def may_count(
        self, key: str, place: int, scale: Scale, units: Number, num_examples: float | None, num_ranks: int
    ) -> bool:
        """Whether the divisor at ``place`` may count the units of this microbatch on all ranks.

        It is whole and not below this rank's units, and it is no constant per example: ``batch * max_length`` moves
        with the examples. A count of all ranks does so too where they hold equally many, and is then ``n`` times the
        units.
        """
        if num_ranks == 1 or not scale.divides or isinstance(scale.value, Tensor) or isinstance(units, Tensor):
            return False
        if scale.value < max(units, 2) or scale.value != int(scale.value):
            return False
        if num_examples is None or scale.value == num_ranks * units:
            return True
        value, examples = self.first.setdefault((key, place), (scale.value, num_examples))
        return scale.value * examples != value * num_examples or num_examples == examples


def view_term(
    term: Term,
    *,
    framework_divisor: int,
    steps: int,
    num_ranks: int,
    num_terms: int = 1,
    num_examples: float | None = None,
    divisors: Divisors | None = None,
) -> TermView:
    """Give every scalar on a term's path its role.

    Args:
        term: What the loss graph says.
        framework_divisor: What the framework itself divides every microbatch's loss by (1 for nothing).
        steps: ``K``, microbatches in a whole window.
        num_ranks: ``n``, data-parallel ranks.
        num_terms: Terms in the loss: dividing a sum of two losses by 2 is an average of losses.
        num_examples: Examples in the microbatch, where known.
        divisors: What is known about divisors, kept from one microbatch to the next.
    """
    scales = list(term.scales)
    whole = _around_the_whole(term)
    framework = 1.0
    if framework_divisor > 1 and scales and scales[0].divides and _is(scales[0], framework_divisor):
        framework = 1.0 / framework_divisor
        scales = scales[1:]
    divisors = Divisors() if divisors is None else divisors
    units, own = _own_count(term, scales, framework != 1.0, divisors, steps)
    scales = [scale for scale in scales if scale is not own and not _is(scale, 1)]
    mean = own is not None or term.kind == "mean"
    user_power = ranks_power = 0
    loose: list[Number] = []
    normalized = counts = False
    for place, scale in enumerate(scales):
        no_power = _averages_terms(scale, num_terms) or not mean and divisors.varies(term.key, place, scale, steps)
        no_power |= not scale.divides and (not any(scale is each for each in whole) or _is_count(scale, term))
        steps_change, ranks_change = (0, 0) if no_power else _powers(scale, term, steps, num_ranks)
        user_power += steps_change
        ranks_power += ranks_change
        if not steps_change and not ranks_change:
            loose.append(_multiplier(scale))
            normalized |= scale.divides and (isinstance(scale.value, Tensor) or abs(scale.value) >= 2)
            counts |= not mean and divisors.may_count(term.key, place, scale, units, num_examples, num_ranks)
    return TermView(
        key=term.key,
        kind="mean" if mean else term.kind,
        num_units=units,
        base=_inverse(units) if mean else 1.0,
        steps=steps,
        framework=framework,
        user_power=user_power,
        ranks_power=ranks_power,
        loose=tuple(loose),
        unit_ratios=_ratios(term, units),
        label=term.reduction,
        num_ranks=num_ranks,
        normalized=normalized,
        counts=counts,
    )


def _own_count(
    term: Term, scales: list[Scale], framework_known: bool, divisors: Divisors, steps: int
) -> tuple[Number, Scale | None]:
    """Find a divisor of a sum that equals one of the term's own counts: the sum is a local mean.

    The innermost divisor is the likeliest. A count of 1 looks like a framework's division by 1 step, so it is taken
    only where the same divisor was a count before, or where the framework's division is another one.
    """
    if term.kind != "sum":
        return (term.units[0] if term.units else 1.0), None
    if not isinstance(term.units[0], Tensor) and term.units[0] == 0:
        # What keeps the divisor from zero: a clamp, an epsilon.
        floor = next((s for s in term.scales if s.divides and not isinstance(s.value, Tensor) and s.value <= 1), None)
        return 0.0, floor
    known = divisors.own
    own_ones = sum(scale.divides and _is(scale, 1) for scale in scales) > (0 if framework_known else 1)
    inside = False  # of this divisor there is another
    for depth, scale in enumerate(reversed(scales)):
        if inside and _is(scale, steps) and steps > 1:
            continue  # for accumulation, whatever it is equal to
        candidates, inside = term.units[:1] if inside else term.units, inside or scale.divides and not _is(scale, 1)
        for units in candidates:
            if not scale.divides or isinstance(units, Tensor) or isinstance(scale.value, Tensor):
                continue
            if not close(units, scale.value) or (term.key, depth) in divisors.others:
                continue
            if not _is(scale, 1):
                known.setdefault(term.key, depth)
            if known.get(term.key, depth if own_ones else -1) == depth:
                return units, scale
    for depth, scale in enumerate(reversed(scales)):
        if scale.divides and not isinstance(scale.value, Tensor) and scale.value > 1 and known.get(term.key) != depth:
            divisors.others.add((term.key, depth))
    return term.units[0], None


def _powers(scale: Scale, term: Term, steps: int, num_ranks: int) -> tuple[int, int]:
    """Powers of ``K`` and ``n`` that an integer in the user's code stands for; (0, 0) if it may be a coefficient.

    A multiplication by ``K`` is one: nothing says that it means accumulation. By ``n`` it undoes an average.
    """
    if not scale.integral or isinstance(scale.value, Tensor):
        return 0, 0
    sign = -1 if scale.divides else 1
    if _is(scale, 2) and term.value_squared:
        return 0, 0  # half the squared error is a convention older than accumulation, twice it no less
    if steps > 1 and _is(scale, steps) and scale.divides:
        return sign, 0
    if num_ranks > 1 and _is(scale, num_ranks):
        return 0, sign
    if steps > 1 and num_ranks > 1 and _is(scale, steps * num_ranks) and scale.divides:
        return sign, sign
    return 0, 0


def _around_the_whole(term: Term) -> tuple[Scale, ...]:
    """The scalars around the whole loss, not around one of its terms, nor below a reduction."""
    steps = term.key.split("/")[:-1]
    outer = next((i for i, step in enumerate(steps) if step not in ("mul", "div", "neg")), len(steps))
    return term.scales[:outer]


def _is_count(scale: Scale, term: Term) -> bool:
    """Whether a multiplier is the term's own count: it turns a mean back into a sum."""
    counts = [units for units in (*term.units, term.rows) if units is not None and not isinstance(units, Tensor)]
    return not isinstance(scale.value, Tensor) and any(close(units, scale.value) for units in counts)


def _averages_terms(scale: Scale, num_terms: int) -> bool:
    return num_terms > 1 and scale.divides and _is(scale, num_terms)


def _is(scale: Scale, number: int) -> bool:
    return not isinstance(scale.value, Tensor) and scale.value == number


def _multiplier(scale: Scale) -> Number:
    value = scale.value.double().abs() if isinstance(scale.value, Tensor) else abs(float(scale.value))
    return _inverse(value) if scale.divides else value


def _inverse(number: Number) -> Number:
    if isinstance(number, Tensor):
        return (1.0 / number.double()).nan_to_num(posinf=0.0)
    return 1.0 / number if number else 0.0


def _ratios(term: Term, units: Number) -> tuple[float, ...]:
    if isinstance(units, Tensor) or not units:
        return (1.0,)
    others = [other / units for other in term.units if not isinstance(other, Tensor) and other != units]
    return (1.0, *others)
