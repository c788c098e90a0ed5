"""The window's account: units and weights per loss term, added up over microbatches and ranks.

``N`` units, ``sum w N`` and ``sum w^2 N`` say everything (design: the weight ledger). All weights are equal exactly
when ``(sum w N)^2 == (sum w^2 N) * (sum N)``; the gradient scale is ``r * sum w N``.
"""

from __future__ import annotations

import dataclasses
import math
import zlib

from torch import Tensor

from accum_plugin.loss_graph import Number
from accum_plugin.normalization import TermView

MAX_TERMS = 4
FIELDS = 4


@dataclasses.dataclass(slots=True)
class TermAccount:
    """One loss term over one window.

    Args:
        units: ``sum N``.
        weighted: ``sum w N`` as the user's code has it.
        squares: ``sum w^2 N``.
        applied: ``sum a w N``, with what the plugin multiplied each microbatch by.
        low: Smallest weight of one unit on this rank.
        high: Largest weight of one unit on this rank.
        microbatches: Microbatches in which the term appeared on this rank.
        view: The latest microbatch's view.
    """

    view: TermView
    units: Number = 0.0
    weighted: Number = 0.0
    squares: Number = 0.0
    applied: Number = 0.0
    low: float = math.inf
    high: float = 0.0
    microbatches: int = 0

    def add(self, view: TermView, applied: Number) -> None:
        """Enter one microbatch whose units the plugin scaled by ``applied``."""
        weight, units = view.weight, view.num_units
        total = weight * units
        self.view = view
        self.units = self.units + units
        self.weighted = self.weighted + total
        self.squares = self.squares + weight * total
        self.applied = self.applied + applied * total
        self.microbatches += 1
        if not isinstance(weight, Tensor) and not isinstance(units, Tensor) and units > 0:
            self.low = min(self.low, weight)
            self.high = max(self.high, weight)

    @property
    def uneven(self) -> bool:
        """Whether units weigh differently within this rank's window."""
        return self.high > self.low * (1 + 1e-9)


@dataclasses.dataclass(slots=True)
class Totals:
    """One term's account over all data-parallel ranks."""

    units: Number
    weighted: Number
    squares: Number
    applied: Number

    @property
    def even(self) -> bool:
        """Whether every unit weighs the same: Cauchy-Schwarz holds with equality."""
        return math.isclose(self.weighted * self.weighted, self.squares * self.units, rel_tol=1e-9)

    @property
    def effective_units(self) -> float:
        """Kish's effective sample size: the honest size of a batch whose units weigh differently."""
        return self.weighted**2 / self.squares if self.squares else 0.0


class Ledger:
    """The accounts of one optimizer's current window on this rank."""

    def __init__(self) -> None:
        self.layout: list[str] = []
        self.accounts: dict[str, TermAccount] = {}
        self.views: dict[str, TermView] = {}  # the latest view of each term, kept over windows
        self.start_window()

    def start_window(self) -> None:
        """Close the books of the window that ended; the order of the terms stays."""
        self.accounts = {}
        self.examples = 0.0
        self._main: str | None = None

    def add(self, view: TermView, applied: Number = 1.0) -> None:
        """Enter one term of one microbatch."""
        account = self.accounts.get(view.key)
        if account is None:
            if view.key not in self.layout:
                self.layout.append(view.key)
            account = self.accounts[view.key] = TermAccount(view)
            self._main = None
        if self.views.get(view.key) is not view:
            self.views[view.key], self._main = view, None
        account.add(view, applied)

    @property
    def main_key(self) -> str | None:
        """The term whose units count as the window's: the first over data, of those in the window if there are."""
        if self._main is None:
            data = [key for key in self.layout[:MAX_TERMS] if self.views[key].kind in ("mean", "sum")]
            self._main = next((key for key in data if key in self.accounts), data[0] if data else None)
        return self._main

    @property
    def main(self) -> TermAccount | None:
        """This rank's account of the main term."""
        return self.accounts.get(self.main_key or "")

    def identity(self, sentinel_identity: float) -> float:
        """A small whole number that is equal on ranks whose accounts line up."""
        main = self.main_key or ""
        names = "|".join([*self.layout[:MAX_TERMS], main, self.views[main].structure if main else ""])
        return float((zlib.crc32(names.encode()) + int(sentinel_identity)) % (1 << 20))

    def fields(self) -> list[Number]:
        """The accounts as numbers to add up over ranks, in the order of ``layout``."""
        numbers: list[Number] = []
        for key in self.layout[:MAX_TERMS]:
            account = self.accounts.get(key)
            numbers += (
                [account.units, account.weighted, account.squares, account.applied] if account else [0.0] * FIELDS
            )
        return numbers + [0.0] * (MAX_TERMS * FIELDS - len(numbers))

    def totals(self, fields: list[Number]) -> dict[str, Totals]:
        """Read summed :meth:`fields` back, per term."""
        keys = enumerate(self.layout[:MAX_TERMS])
        read = {key: Totals(*fields[i * FIELDS : (i + 1) * FIELDS]) for i, key in keys}
        return {key: total for key, total in read.items() if isinstance(total.units, Tensor) or total.units > 0}
