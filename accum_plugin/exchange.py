"""What ranks tell each other: 32 float64 numbers, added up once per optimizer step.

======= ==========================================================================================
slot    number
======= ==========================================================================================
0       flags: ranks that failed, ranks whose own microbatches weigh unequally, and ranks whose window cannot be judged
1       squares of each rank's units (equal units on all ranks: ``n sum x^2 = (sum x)^2``)
2, 3    examples; microbatches
4, 5    identity of the layout and its square, to know that all ranks sent the same one
6, 7    squares of the followed gradient elements; sizes of their contributions
8-15    the sentinel: contributions, then gradients
16-31   four terms of ``N, sum w N, sum w^2 N, sum a w N``
======= ==========================================================================================
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accum_plugin.ledger import FIELDS, MAX_TERMS, Ledger, Totals
from accum_plugin.sentinel import SLOTS

if TYPE_CHECKING:
    from accum_plugin.reduction import Reduction
    from accum_plugin.window import OptimizerWindow

HEADER = 8
FIRST_FIELD = HEADER + 2 * SLOTS
PAYLOAD = FIRST_FIELD + MAX_TERMS * FIELDS  # 32 float64 numbers: 256 bytes
FAILED = [1.0] + [0.0] * (PAYLOAD - 1)
_UNEVEN, _UNJUDGED = float(1 << 16), float(1 << 32)  # flags share one slot, each with room for 65535 ranks


def on_host(number: float | Tensor) -> float:
    """Read a number on the host; a synchronization where it lives on an accelerator."""
    return float(number.tolist()) if isinstance(number, Tensor) else float(number)


def payload_of(window: OptimizerWindow, loss_scale: Tensor | None, read: bool, spoiled: bool) -> list[float]:
    """One rank's numbers at the optimizer boundary.

    Args:
        window: The optimizer's window.
        loss_scale: AMP's scale, which contributions carry and unscaled gradients do not.
        read: Whether what the sentinel holds on an accelerator may be read.
        spoiled: Whether this rank's gradients are not what its books say.
    """
    mine, grads, sizes, identity = window.sentinel.sample(read=read)
    scale = 1.0 if loss_scale is None or not any(sizes) else on_host(loss_scale)
    account = window.ledger.main
    units = on_host(account.units) if account is not None else 0.0
    uneven = _UNEVEN if account is not None and account.uneven else 0.0
    absent = (0 if account is None else account.microbatches) < window.microbatches
    mark = window.ledger.identity(identity)
    flags = uneven + (_UNJUDGED if spoiled or absent else 0.0)
    header = [flags, units * units, window.ledger.examples, float(window.microbatches), mark, mark * mark]
    header += [sum(g * g for g in grads), sum(sizes) / scale]
    return header + [value / scale for value in mine] + grads + [on_host(n) for n in window.ledger.fields()]


def terms_payload(ledger: Ledger) -> list[float]:
    """One rank's numbers before gradients are combined for the first time: the terms alone."""
    mark = ledger.identity(0.0)
    microbatches = max((account.microbatches for account in ledger.accounts.values()), default=0)
    header = [0.0, 0.0, 0.0, float(microbatches), mark, mark * mark, 0.0, 0.0]
    return header + [0.0] * (2 * SLOTS) + [on_host(number) for number in ledger.fields()]


def device_payload(window: OptimizerWindow, device: torch.device) -> Tensor:
    """One rank's numbers as a tensor on ``device``, for a step on which the host waits for nothing."""
    mark = window.ledger.identity(0.0)
    numbers = [0.0, 0.0, window.ledger.examples, float(window.microbatches), mark, mark * mark]
    numbers += [0.0] * (FIRST_FIELD - len(numbers))
    known = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    fields = [torch.as_tensor(n, dtype=torch.float64, device=device) for n in window.ledger.fields()]
    return torch.cat([known, torch.stack(fields)])


@dataclasses.dataclass(frozen=True)
class Sums:
    """The numbers of all ranks, added up.

    Args:
        numbers: ``PAYLOAD`` of them.
        num_ranks: Data-parallel ranks.
    """

    numbers: list[float]
    num_ranks: int

    @property
    def failures(self) -> int:
        """Ranks that reported an internal error."""
        return round(self.numbers[0] % _UNEVEN)

    @property
    def uneven_within(self) -> bool:
        """Whether units weigh differently within the window of at least one rank."""
        return self.numbers[0] % _UNJUDGED >= _UNEVEN

    @property
    def unjudged(self) -> bool:
        """Whether the window cannot be judged: on some rank a microbatch has another loss, or gradients were lost."""
        return self.numbers[0] >= _UNJUDGED

    @property
    def even(self) -> bool:
        """Whether every unit of every term weighs the same."""
        return all(total.even for total in self._slots())

    @property
    def kept(self) -> float:
        """What takes back the scaling of microbatches where ranks cannot compare terms: the same on all of them."""
        slots = self._slots()
        applied = sum(total.applied for total in slots)
        return sum(total.weighted for total in slots) / applied if applied else 1.0

    def _slots(self) -> list[Totals]:
        fields = self.numbers[FIRST_FIELD:]
        slots = [Totals(*fields[i : i + FIELDS]) for i in range(0, len(fields), FIELDS)]
        return [slot for slot in slots if slot.units > 0]

    def uneven_ranks(self, units: float) -> bool:
        """Whether ranks hold different numbers of units."""
        return self.num_ranks * self.numbers[1] > units * units * (1 + 1e-9)

    @property
    def examples(self) -> int:
        """Examples in the window."""
        return round(self.numbers[2])

    @property
    def microbatches(self) -> float:
        """Microbatches in the window, of all ranks together."""
        return self.numbers[3]

    @property
    def comparable(self) -> bool:
        """Whether all ranks sent the same layout."""
        return math.isclose(self.num_ranks * self.numbers[5], self.numbers[4] ** 2, rel_tol=1e-12)

    @property
    def square_sum(self) -> float:
        """Squares of the followed gradient elements."""
        return self.numbers[6]

    @property
    def magnitude(self) -> float:
        """Sizes of all contributions to the followed elements."""
        return self.numbers[7]

    @property
    def contributions(self) -> list[float]:
        """What was contributed to each followed element."""
        return self.numbers[HEADER : HEADER + SLOTS]

    @property
    def gradients(self) -> list[float]:
        """Each followed element of ``.grad``."""
        return self.numbers[HEADER + SLOTS : FIRST_FIELD]

    def totals(self, ledger: Ledger) -> dict[str, Totals]:
        """The account of every term in ``ledger``'s layout."""
        return ledger.totals(self.numbers[FIRST_FIELD:]) if self.comparable else {}


def exchange(payload: list[float], reduction: Reduction) -> Sums:
    """Add a payload up over the data-parallel ranks; every one of them must be here."""
    return Sums(reduction.sum(payload), reduction.num_ranks)
