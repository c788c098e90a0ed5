"""ACC401: the effective batch and the learning rate, before and after a resume."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.rules.data import EffectiveBatchChanged

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow


@dataclasses.dataclass(frozen=True)
class EffectiveBatch:
    """The effective batch as its three factors, and the learning rates that belong to it.

    Args:
        microbatch: Examples in a microbatch on one rank.
        steps: Microbatches in a window, ``K``.
        ranks: Data-parallel ranks, ``n``.
        rates: Learning rate of every parameter group (the initial one where there is a scheduler).
    """

    microbatch: int
    steps: int
    ranks: int
    rates: tuple[float, ...]

    @property
    def product(self) -> int:
        """Examples in one update."""
        return self.microbatch * self.steps * self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {**dataclasses.asdict(self), "rates": list(self.rates), "effective_batch": self.product}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EffectiveBatch:
        """Rebuild from :meth:`to_dict`."""
        return cls(int(data["microbatch"]), int(data["steps"]), int(data["ranks"]), tuple(data["rates"]))


class Resume(Neighbor):
    """Keeps the effective batch for the checkpoint, and compares it in the first window after a resume."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._saved: EffectiveBatch | None = None
        self._largest = 0  # examples in a microbatch: the last of an epoch may be short
        self._windows = 0  # stepped on since the resume

    def entered(self, window: OptimizerWindow) -> None:
        """Learn the size of a microbatch."""
        self._largest = max(self._largest, int(window.backwards[-1].examples or 0))

    def stepping(self, window: OptimizerWindow) -> None:
        """Compare with the checkpoint as soon as the factors are known."""
        if self._saved is None:
            return
        self._windows += 1
        current = self.current()
        # the last batch may be short, and a window that was interrupted by the checkpoint is
        if current is None or self.host.at_end_of_data() or self.host.steps() == 1 and self._windows < 2:
            return
        saved, self._saved = self._saved, None
        finding = compare(saved, current)
        if finding is not None:
            self.report(dataclasses.replace(finding, optimizer_step=window.steps_taken))

    def current(self) -> EffectiveBatch | None:
        """The effective batch of this run; ``None`` before its first microbatch, or where no batch size is known."""
        if not self._largest:
            return None
        session = self.session
        steps, ranks = session.boundary.steps(), session.reduction.num_ranks
        return EffectiveBatch(self._largest, steps, ranks, base_rates(session.windows))

    def state_dict(self) -> dict[str, Any]:
        """What belongs in a checkpoint."""
        batch = self.current() or self._saved
        return {} if batch is None else {"effective_batch": batch.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's effective batch, to be compared with this run's."""
        saved = state.get("effective_batch")
        self._saved = EffectiveBatch.from_dict(saved) if saved else None


def base_rates(windows: list[OptimizerWindow]) -> tuple[float, ...]:
    """Learning rates without what a scheduler made of them."""
    groups = [group for window in windows for group in window.optimizer.param_groups]
    return tuple(float(group.get("initial_lr", group.get("lr", math.nan))) for group in groups)


def compare(saved: EffectiveBatch, current: EffectiveBatch) -> Finding | None:
    """Say which factor changed, where the product did and the learning rate did not.

    Args:
        saved: As the checkpoint has it.
        current: As this run has it.
    """
    same_rate = len(saved.rates) == len(current.rates) and all(
        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(saved.rates, current.rates)
    )
    if saved.product == current.product or not same_rate:
        return None
    names = {"microbatch": "examples in a microbatch", "steps": "accumulation steps", "ranks": "ranks"}
    changed = [
        f"{words} {getattr(saved, name)} -> {getattr(current, name)}"
        for name, words in names.items()
        if getattr(saved, name) != getattr(current, name)
    ]
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(current.rates))
    seen = (
        f"the checkpoint was trained with an effective batch of {saved.microbatch} x {saved.steps} x {saved.ranks} = "
        f"{saved.product}, this run has {current.microbatch} x {current.steps} x {current.ranks} = {current.product} "
        f"({'; '.join(changed)}), at the same learning rate {rates}."
    )
    return EffectiveBatchChanged.finding(seen, evidence="configuration")
