"""What a row of the corpus is, and what becomes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from accum_plugin import Finding, WindowRecord

TOLERANCE = 1e-4  # of a factor, relative
EXACT = 1e-9  # of a corrected gradient in float64, relative

#: Gradient seen over gradient meant, as a function of ranks, accumulation steps, and microbatches in the window.
FACTORS: dict[str, Callable[[int, int, int], float]] = {
    "n": lambda n, K, m: n,
    "1/n": lambda n, K, m: 1 / n,
    "K": lambda n, K, m: K,
    "1/K": lambda n, K, m: 1 / K,
    "m/K": lambda n, K, m: m / K,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a loop runs.

    Args:
        rank: This rank.
        n: Data-parallel ranks.
        K: Accumulation steps.
        m: Microbatches in the window that the row is about.
        mode: The plugin's mode; ``None`` leaves the plugin out.
    """

    rank: int
    n: int
    K: int
    m: int
    mode: str | None


@dataclasses.dataclass
class Outcome:
    """What a loop reports from one rank.

    Args:
        gradients: The gradient at each optimizer step, flat.
        findings: What the plugin said.
        windows: The plugin's records.
        meant: The one-process, one-batch gradient of each step's examples, where the row compares with it.
        note: Anything else the row checks.
    """

    gradients: list[list[float]]
    findings: list[Finding]
    windows: list[WindowRecord]
    meant: list[list[float]] | None = None
    note: object = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a pattern, where it was reported, and what the plugin must say about it.

    Args:
        id: Stable name; a letter behind the number marks a second variant of the same report.
        text: The pattern, in one line.
        source: Where it was reported.
        framework: ``"Accelerate"``, ``"Trainer"`` (transformers) or ``"Lightning"``.
        loop: ``loop(setting)``: the training loop itself.
        found: Codes that must be found, each with its factor's formula (a key of :data:`FACTORS`), or ``None`` for
            a finding without one. Empty: the plugin must be silent and change nothing.
        fixed: Whether ``mode="fix"`` must produce the one-process gradient.
        n: Data-parallel ranks.
        K: Accumulation steps.
        m: Microbatches in the window that the row is about; ``K`` if left out.
        says: What the messages must contain.
        also: Codes that rightly come along.
        fact: Whether the finding is worth knowing and no alarm.
        exact: How far a corrected gradient may be off, relative.
        holds: ``holds(outcome)``, whether the rest is as it should be.
        known: Why the row is allowed to fail; printed in the table.
    """

    id: str
    text: str
    source: str
    framework: str
    loop: Callable[[Setting], Outcome]
    found: dict[str, str | None] = dataclasses.field(default_factory=dict)
    fixed: bool = False
    n: int = 1
    K: int = 4
    m: int | None = None
    says: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    fact: bool = False
    exact: float = EXACT
    holds: Callable[[Outcome], bool] | None = None
    known: str = ""

    @property
    def silent(self) -> bool:
        """Whether the plugin must say nothing."""
        return not self.found

    def setting(self, rank: int, mode: str | None) -> Setting:
        """Where the row's loop runs on one rank."""
        return Setting(rank, self.n, self.K, self.m or self.K, mode)

    def factor(self, code: str) -> float | None:
        """The factor that a finding must state."""
        formula = self.found[code]
        return None if formula is None else FACTORS[formula](self.n, self.K, self.m or self.K)


@dataclasses.dataclass
class Verdict:
    """How a row came out.

    Args:
        case: The row.
        found: Whether every code was found.
        factor: Whether every factor is right; ``None`` where the row states none.
        fixed: Whether the corrected gradient is the one-process gradient; ``None`` where the row does not ask.
        false_alarms: Codes that should not be there.
        problems: Everything that is not as the row says, in words.
    """

    case: Case
    found: bool = True
    factor: bool | None = None
    fixed: bool | None = None
    false_alarms: tuple[str, ...] = ()
    problems: list[str] = dataclasses.field(default_factory=list)


def judge(case: Case, plain: Sequence[Outcome], watched: Sequence[Outcome]) -> Verdict:
    """Compare what happened with what the row says.

    Args:
        case: The row.
        plain: Each rank's run without the plugin.
        watched: Each rank's run in ``mode="fix"``.
    """
    verdict = Verdict(case)
    expected = {*case.found, *case.also}
    alarms = {f.code: f for f in watched[0].findings if f.certainty != "info"}
    false = [f for o in watched for f in o.findings if f.certainty != "info" and f.code not in expected]
    verdict.false_alarms = tuple(sorted({f.code for f in false}))
    if false:
        verdict.problems.append(f"false alarm: {false[0].message}")
    if case.silent:
        _judge_silent(verdict, plain, watched)
    else:
        _judge_found(verdict, {f.code: f for f in watched[0].findings} if case.fact else alarms)
        _judge_factors(verdict, plain)
        if case.fixed:
            _judge_fix(verdict, watched)
    if case.holds is not None and not all(case.holds(outcome) for outcome in watched):
        verdict.problems.append(f"does not hold: {(case.holds.__doc__ or '').strip()} {watched[0].note}")
    return verdict


def _judge_silent(verdict: Verdict, plain: Sequence[Outcome], watched: Sequence[Outcome]) -> None:
    if not all(outcome.gradients and outcome.windows for outcome in watched):
        verdict.problems.append("no step was watched")
    if any(a.gradients != b.gradients for a, b in zip(plain, watched)):
        changed = [compared(a, b) for x, y in zip(plain, watched) for a, b in zip(y.gradients, x.gradients) if a != b]
        verdict.problems.append(f"gradients changed: {changed[:3]}")


def _judge_found(verdict: Verdict, findings: dict[str, Finding]) -> None:
    case = verdict.case
    stated = [code for code in case.found if case.found[code] is not None]
    missing = sorted(set(case.found) - set(findings))
    if missing:
        verdict.found = False
        verdict.problems.append(f"not found: {', '.join(missing)} (found: {', '.join(sorted(findings)) or 'nothing'})")
    said = " ".join(findings[code].message for code in case.found if code in findings)
    unsaid = [text for text in case.says if text not in said]
    if unsaid:
        verdict.problems.append(f"the message lacks {unsaid}: {said}")
    if stated:
        factors = {code: findings[code].factor if code in findings else None for code in stated}
        wrong = [code for code in stated if not near(factors[code], case.factor(code))]
        verdict.factor = not wrong
        verdict.problems += [f"{code}: factor {factors[code]}, not {case.factor(code)}" for code in wrong]
    if case.fixed and any(findings[code].action != "corrected" for code in stated if code in findings):
        verdict.problems.append("reported, not corrected")


def _judge_factors(verdict: Verdict, plain: Sequence[Outcome]) -> None:
    """Hold the row itself to the facts: without the plugin the last gradient is off by the product of its factors."""
    meant, case = plain[0].meant, verdict.case
    if meant is None:
        return
    stated = [case.factor(code) for code in case.found if case.found[code] is not None]
    product = math.prod(stated) if stated else None
    seen = plain[0].gradients[-1]
    right = [value * product for value in meant[-1]] if product is not None else None
    if right is not None and not alike(seen, right, TOLERANCE):
        verdict.problems.append(f"the row's factor {product} is not what happens: {compared(seen, right)}")
    if right is None and alike(seen, meant[-1], TOLERANCE):
        verdict.problems.append("the row's loop does nothing wrong")


def _judge_fix(verdict: Verdict, watched: Sequence[Outcome]) -> None:
    verdict.fixed = True
    for outcome in watched:
        meant = outcome.meant or []
        if not len(outcome.gradients) == len(meant) > 0:
            verdict.fixed = False
            verdict.problems.append(f"{len(outcome.gradients)} steps, not {len(meant)}")
        for step, (seen, right) in enumerate(zip(outcome.gradients, meant)):
            if not alike(seen, right, verdict.case.exact):
                verdict.fixed = False
                verdict.problems.append(f"not corrected at step {step}: {compared(seen, right)}")


def near(value: float | None, expected: float | None) -> bool:
    """Whether a stated factor is the expected one."""
    return value is not None and expected is not None and math.isclose(value, expected, rel_tol=TOLERANCE)


def alike(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    """Whether two gradients agree, relative to the larger one's length."""
    return len(one) == len(other) and math.dist(one, other) <= tolerance * max(math.hypot(*one), math.hypot(*other))


def compared(seen: Sequence[float], right: Sequence[float]) -> str:
    """Two gradients, in words."""
    if len(seen) != len(right):
        return f"{len(seen)} elements, not {len(right)}"
    lengths = f"length {math.hypot(*seen):.6g} where {math.hypot(*right):.6g} was meant"
    return f"{lengths}, apart by {math.dist(seen, right):.3g}"
