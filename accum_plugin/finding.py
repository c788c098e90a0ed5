"""What the plugin says: one finding per code and cause, and the log that counts repeats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

Certainty = Literal["certain", "suspected", "info"]
Evidence = Literal["measured", "graph", "probe", "configuration", "declared"]
Action = Literal["corrected", "reported"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a training run.

    Args:
        code: Stable rule code, for example ``"ACC103"``.
        name: The rule's name, for example ``"accumulation-divided-twice"``.
        message: What was seen, why it matters, and the smallest change that settles it.
        factor: Gradient seen over gradient meant; ``None`` where no single number says it.
        certainty: ``"certain"``, ``"suspected"`` or ``"info"``.
        evidence: What the finding rests on.
        action: ``"corrected"`` if the plugin put it right, else ``"reported"``.
        optimizer_step: Index of the optimizer step it was first seen at (0 for the first).
        hint: The smallest change that settles it.
        cause: Tells apart two findings of one code (a term of the loss, an optimizer).
    """

    code: str
    name: str
    message: str
    factor: float | None = None
    certainty: Certainty = "certain"
    evidence: Evidence = "measured"
    action: Action = "reported"
    optimizer_step: int = 0
    hint: str = ""
    cause: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable data; a factor that is not finite becomes ``None``."""
        data = dataclasses.asdict(self)
        if self.factor is not None and not math.isfinite(self.factor):
            data["factor"] = None
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """Rebuild a finding from :meth:`to_dict`; keys it does not know are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in names})


class FindingLog:
    """Keeps one finding per code and cause, counts repeats, and drops what the user ignores.

    Args:
        ignore: Rule codes to silence.
    """

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        self._ignore = frozenset(ignore)
        self._by_key: dict[tuple[str, str], Finding] = {}
        self.repeats: dict[tuple[str, str], int] = {}
        self.findings: list[Finding] = []

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def ignores(self, code: str) -> bool:
        """Whether the user silenced ``code``."""
        return code in self._ignore

    def is_new(self, finding: Finding) -> bool:
        """Whether :meth:`add` would record ``finding``."""
        return finding.code not in self._ignore and (finding.code, finding.cause) not in self._by_key

    def add(self, finding: Finding) -> bool:
        """Record ``finding``; return whether it is new (not ignored, not a repeat)."""
        key = (finding.code, finding.cause)
        if not self.is_new(finding):
            if key in self.repeats:
                self.repeats[key] += 1
            return False
        self._by_key[key] = finding
        self.repeats[key] = 1
        self.findings.append(finding)
        return True
