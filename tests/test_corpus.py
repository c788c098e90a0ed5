"""Every row of the corpus on its real framework and ranks; the table at the end of the run says how many came out right.

Loops that need FSDP, DeepSpeed or tensor parallelism to run are not in the table: those wrappers are not supported yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import CORPUS
from corpus.case import FACTORS, Case, Verdict
from corpus.report import page
from corpus.running import verdicts
from corpus.table import CASES

REPORTED = [
    *(f"A{number}" for number in range(1, 16)),
    *(f"T{number}" for number in range(1, 4)),
    *(f"L{number}" for number in range(1, 18)),
    *(f"S{number}" for number in range(1, 24)),
]


@pytest.fixture
def outcome(request: pytest.FixtureRequest, ranks: Callable[..., list[Any]]) -> Callable[[Case], Verdict]:
    """A row's verdict; rows of equally many ranks run together, when the first of them is asked for."""
    known = request.config.stash.setdefault(CORPUS, {})
    chosen = {item.callspec.params["case"] for item in request.session.items if item.function.__name__ == "test_case"}

    def get(case: Case) -> Verdict:
        if case.id not in known:
            group = [other for other in CASES if other in chosen and other.n == case.n]
            known.update({verdict.case.id: verdict for verdict in verdicts(group, ranks)})
        return known[case.id]

    return get


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, outcome: Callable[[Case], Verdict]) -> None:
    verdict = outcome(case)
    if case.known:
        assert verdict.problems, f"{case.id} works now: drop its known={case.known!r}"
    else:
        assert not verdict.problems, "\n".join(verdict.problems)


def test_every_reported_case_has_a_row() -> None:
    assert {case.id.rstrip("bc") for case in CASES} == set(REPORTED)
    assert len({case.id for case in CASES}) == len(CASES)


def test_factors_are_told_apart() -> None:
    """With the row's numbers no other formula gives the same factor: two mistakes do not look alike."""
    for case in CASES:
        for formula in filter(None, case.found.values()):
            numbers = case.n, case.K, case.m or case.K
            mine = FACTORS[formula](*numbers)
            same = [name for name, factor in FACTORS.items() if name != formula and factor(*numbers) == mine]
            trivial = {"n", "1/n"} if case.n == 1 else set()
            trivial |= {"K", "1/K", "m/K"} if case.K == 1 else {"m/K"} if case.m is None else set()
            assert mine != 1 and not set(same) - trivial, case.id


def test_page_is_up_to_date() -> None:
    text = (PAGE := __import__("corpus.report", fromlist=["PAGE"]).PAGE).read_text(encoding="utf-8")
    rows = [line for line in page([Verdict(case) for case in CASES]).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:4] for row in rows] == [line.split(" | ")[:4] for line in text.splitlines() if line.startswith("| ")]
