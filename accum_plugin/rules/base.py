"""What a rule is: a code, a name, a published page (its docstring) and a way to word a finding."""

from __future__ import annotations

from typing import ClassVar

from accum_plugin.finding import Action, Certainty, Evidence, Finding

RULES: dict[str, type[Rule]] = {}


class Rule:
    """Base of every rule; a subclass registers itself under its code.

    A subclass gives ``code``, ``name``, ``why`` (one sentence: why it matters), ``remedy`` (the
    smallest change that settles it), whether ``mode="fix"`` ``corrects`` it, and a docstring that is its page.
    """

    code: ClassVar[str] = ""
    name: ClassVar[str] = ""
    why: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    corrects: ClassVar[bool] = False  # whether mode="fix" can put it right

    def __init_subclass__(cls) -> None:
        RULES[cls.code] = cls

    @classmethod
    def finding(
        cls,
        seen: str,
        *,
        factor: float | None = None,
        certainty: Certainty = "certain",
        evidence: Evidence = "measured",
        action: Action = "reported",
        optimizer_step: int = 0,
        remedy: str | None = None,
        why: str | None = None,
        cause: str = "",
    ) -> Finding:
        """Word a finding: what was ``seen`` (in numbers), why it matters, what settles it."""
        remedy = cls.remedy if remedy is None else remedy
        why = cls.why if why is None else why
        done = "Corrected for this run; to fix it for good: " if action == "corrected" else ""
        parts = (f"{cls.code} ({cls.name}): {seen}", why, done + remedy, f"More: accum-plugin explain {cls.code}")
        return Finding(
            code=cls.code,
            name=cls.name,
            message=" ".join(part for part in parts if part),
            factor=factor,
            certainty=certainty,
            evidence=evidence,
            action=action,
            optimizer_step=optimizer_step,
            hint=remedy,
            cause=cause,
        )
