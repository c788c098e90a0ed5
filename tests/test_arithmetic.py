"""The arithmetic alone: drawn windows, judged and corrected, against what the definition of the gradient scale says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accum_plugin.correction import Correction
from accum_plugin.diagnosis import Window, judge
from accum_plugin.exchange import FIRST_FIELD, PAYLOAD, Sums, terms_payload
from accum_plugin.ledger import Ledger
from accum_plugin.loss_graph import LossReading, Scale, Term
from accum_plugin.measurement import measure
from accum_plugin.normalization import view_term
from accum_plugin.verdict import boundary_factor


def mean_term(units: float, *scales: Scale) -> Term:
    return Term("mean", "mean", "mean", (units,), scales, None, 0)


def sum_term(units: float, *scales: Scale) -> Term:
    return Term("sum", "sum", "sum", (units,), scales, None, 0)


def divide(value: float) -> Scale:
    return Scale(value, True, isinstance(value, int))


def add_up(counts, make, *, steps, framework=1):
    """Book ``counts[rank][microbatch]`` units on every rank; return the sums, and a rank's ledger."""
    correction, ledgers = Correction(True), []
    for row in counts:
        ledger = Ledger()
        for units in row:
            view = view_term(make(units), framework_divisor=framework, steps=steps, num_ranks=len(counts))
            applied = correction.before_backward(None, LossReading(()), ()) or correction._factors((view,))
            ledger.add(view, applied[0])
        ledgers.append(ledger)
    numbers = [sum(column) for column in zip(*(terms_payload(ledger) for ledger in ledgers))]
    return Sums(numbers, len(counts)), ledgers[0]


def outcome(counts, make, *, steps, reduction, framework=1):
    sums, ledger = add_up(counts, make, steps=steps, framework=framework)
    ((key, totals),) = sums.totals(ledger).items()
    facts = Window(len(counts[0]), steps, len(counts), reduction)
    judgement = judge(ledger.views[key], totals, facts)
    factor = boundary_factor(ledger.views[key], totals, judgement, reduction, list(judgement.causes))
    return judgement, factor


def codes(judgement) -> dict[str, float]:
    return {cause.rule.code: cause.factor for cause in judgement.causes}


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))


@given(shapes, st.integers(1, 40))
def test_a_right_mean_is_one_whatever_the_shape(shape, size):
    n, k = shape
    judgement, factor = outcome(
        [[size] * k] * n, lambda u: mean_term(u, divide(k)), steps=k, framework=k, reduction=1 / n
    )
    assert judgement.scale == 1.0 and not judgement.causes and factor == 1.0


@pytest.mark.parametrize(
    ("n", "k", "m", "reduction", "user", "framework", "expected"),
    [
        (2, 3, 3, "mean", (3,), 3, {"ACC103": 1 / 3}),
        (2, 3, 3, "sum", (), 3, {"ACC102": 2.0}),
        (2, 3, 3, "mean", (), 1, {"ACC104": 3.0}),
        (2, 3, 2, "mean", (), 3, {"ACC105": 2 / 3}),
        (2, 3, 3, "mean", (2,), 3, {"ACC101": 1 / 2}),
        (2, 3, 3, "sum", (3,), 3, {"ACC102": 2.0, "ACC103": 1 / 3}),
        (2, 3, 2, "mean", (3,), 3, {"ACC103": 1 / 3, "ACC105": 2 / 3}),
        (3, 5, 5, "mean", (15,), 5, {"ACC101": 1 / 3, "ACC103": 1 / 5}),
    ],
)
def test_each_cause_is_named_with_its_own_factor(n, k, m, reduction, user, framework, expected):
    r = 1.0 if reduction == "sum" else 1 / n
    scales = [divide(k)] * (framework > 1) + [divide(value) for value in user]
    judgement, factor = outcome(
        [[5] * m] * n, lambda u: mean_term(u, *scales), steps=k, framework=framework, reduction=r
    )
    assert codes(judgement) == pytest.approx(expected)
    assert judgement.scale == pytest.approx(math.prod(expected.values()))
    assert factor * judgement.scale == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("coefficient", [0.5, 0.1, 3.7, 1e-3])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (2, 2), (2, 3)])
def test_a_coefficient_is_left_alone(coefficient, n, k):
    scales = (divide(k), Scale(coefficient, False, False))
    judgement, factor = outcome([[5] * k] * n, lambda u: mean_term(u, *scales), steps=k, framework=k, reduction=1 / n)
    assert judgement.scale == 1.0 and factor == 1.0


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_a_sum_over_the_global_count_is_one_when_summed_and_one_nth_when_averaged(n, k, data):
    counts = [
        [data.draw(st.integers(2, 30)) for _ in range(k)] for _ in range(n)
    ]  # at 1 each, / 2 may be a coefficient
    total = sum(map(sum, counts))
    make = lambda u: sum_term(u, Scale(float(total), True, False))  # noqa: E731
    judgement, factor = outcome(counts, make, steps=k, reduction=1.0)
    assert judgement.scale == 1.0 and factor == 1.0
    if n > 1:
        judgement, factor = outcome(counts, make, steps=k, reduction=1 / n)
        assert judgement.scale == pytest.approx(1 / n) and codes(judgement) == {"ACC101": pytest.approx(1 / n)}
        assert factor == pytest.approx(n)


def test_a_constant_normalizer_is_a_choice():
    judgement, factor = outcome(
        [[7, 9], [4, 8]], lambda u: sum_term(u, divide(1000)), steps=2, framework=1, reduction=0.5
    )
    assert judgement.scale is None and not judgement.causes and factor == 1.0


def test_a_plain_sum_is_reported_and_not_corrected():
    judgement, factor = outcome([[5] * 3] * 2, lambda u: sum_term(u, divide(3)), steps=3, framework=3, reduction=0.5)
    assert codes(judgement) == {"ACC108": pytest.approx(1 / 6)}
    assert judgement.causes[0].certainty == "suspected" and factor == 1.0


@settings(max_examples=60)
@given(
    st.lists(st.floats(-5, 5).filter(lambda x: abs(x) > 1e-3), min_size=4, max_size=4),
    st.sampled_from([1.0, 0.5, 0.25]),
)
def test_the_reduction_is_measured(contributions, ratio):
    ranks = round(1 / ratio)
    grads = [c * ratio * ranks for c in contributions]
    squares = sum((c * ratio) ** 2 for c in contributions) * ranks
    measured = measure(contributions, grads, squares, sum(map(abs, contributions)), ranks, 1.2e-7)
    assert measured.scalar and measured.agree and measured.snap([1.0, ratio]) == ratio


def test_ranks_that_hold_different_gradients_do_not_agree():
    measured = measure([3.0, 1.0, 2.0, 1.0], [3.0, 1.0, 2.0, 1.0], 9.5, 7.0, 2, 1.2e-7)
    assert not measured.agree


def test_the_payload_is_256_bytes():
    assert PAYLOAD * 8 == 256 and FIRST_FIELD == 16
