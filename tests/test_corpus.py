"""Every row of the corpus on its real framework and ranks; a table at the end of the run says how they came out.

Loops that need FSDP, DeepSpeed or tensor parallelism to run are not in the table: those wrappers are not supported yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CORPUS
from corpus.case import FACTORS, Case, Outcome, Verdict, judge
from corpus.report import PAGE, page
from corpus.running import verdicts
from corpus.table import CASES

from accum_plugin import Finding, WindowRecord

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
    chosen = {item.callspec.id for item in request.session.items if getattr(item, "originalname", "") == "test_case"}

    def get(case: Case) -> Verdict:
        if case.id not in known:
            group = [other for other in CASES if other.id in chosen and other.n == case.n]
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
            trivial |= {"1/K"} if case.m == 1 else set()
            assert mine != 1 and not set(same) - trivial, case.id


def test_page_is_up_to_date() -> None:
    """The page holds these rows; whether they come out as it says, :func:`test_case` says."""

    def rows(text: str) -> list[list[str]]:
        return [line.split(" | ")[:4] for line in text.splitlines() if line.startswith("| ")]

    assert rows(PAGE.read_text(encoding="utf-8")) == rows(page([Verdict(case) for case in CASES]))


def seen(*gradients: float, finding: Finding | None = None, meant: float = 8.0) -> Outcome:
    window = WindowRecord(0, 1, 1, 1.0, 1.0, 1.0, 1.0, 0.1, 1.0, 1)
    return Outcome([[value] for value in gradients], [finding] if finding else [], [window], [[meant]])


def found(factor: float, code: str = "ACC103") -> Finding:
    return Finding(code, "", "", factor=factor, action="corrected")


ROW = Case("A1", "", "", "Accelerate", lambda at: seen(), {"ACC103": "1/K"}, fixed=True, K=4)
SILENT = dataclasses.replace(ROW, found={}, fixed=False)


def test_what_goes_wrong_is_seen() -> None:
    assert not judge(ROW, [seen(2.0)], [seen(8.0, finding=found(0.25))]).problems
    missed = judge(ROW, [seen(2.0)], [seen(2.0)])
    assert not missed.found and not missed.factor and not missed.fixed
    assert not judge(ROW, [seen(2.0)], [seen(8.0, finding=found(0.3))]).factor
    assert not judge(ROW, [seen(2.0)], [seen(8.1, finding=found(0.25))]).fixed
    assert "is not what happens" in judge(ROW, [seen(4.0)], [seen(8.0, finding=found(0.25))]).problems[0]
    assert not judge(SILENT, [seen(8.0)], [seen(8.0)]).problems
    assert judge(SILENT, [seen(8.0)], [seen(8.0000001)]).problems
    assert judge(SILENT, [seen(8.0)], [seen(8.0, finding=found(0.25))]).false_alarms == ("ACC103",)
