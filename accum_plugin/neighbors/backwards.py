"""ACC207 and ACC208: how a microbatch's backward pass was run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.rules.boundary import BackwardBypassed, SyncEveryMicrobatch

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import Backward, OptimizerWindow


class Backwards(Neighbor):
    """Notes, at every backward pass, whether the ranks were combined and whether the framework ran it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._combines = False
        self._combined: dict[int, set[int]] = {}
        self._bypass: Finding | None = None  # of the backward pass at hand
        self._bypassed: list[tuple[Backward, Finding]] = []

    @property
    def combined(self) -> bool:
        """Whether the latest backward pass left gradients that are combined over the ranks."""
        return self._combines or not self.session.reduction.wrappers

    def before_backward(self) -> None:
        """Note what the wrapper is about to do, and what a bypassed framework is not."""
        self._combines = self.session.reduction.synchronizes()
        self._bypass = None
        skipped = self.host.skipped_by_bypass() if self.host.bypassed else ()
        if skipped:
            self._bypass = bypassed(skipped, self._divides_itself())

    def entered(self, window: OptimizerWindow) -> None:
        """Count the window's reductions, and note what was run past the framework."""
        if self._bypass is not None:
            self._bypassed.append((window.backwards[-1], self._bypass))
        if self._combines:
            self._combined.setdefault(window.index, set()).add(window.backwards[-1].microbatch)

    def stepping(self, window: OptimizerWindow) -> None:
        """Say what was run past the framework and reaches a step; a validation's gradients that are cleared do not."""
        told, self._bypassed = self._bypassed, []
        for backward, finding in told:
            if any(entry is backward for entry in window.backwards):
                self.report(finding)
            elif any(entry is backward for other in self.session.windows for entry in other.backwards):
                self._bypassed.append((backward, finding))

    def stepped(self, window: OptimizerWindow) -> None:
        """Say when all but one of the reductions were unnecessary."""
        combined = len(self._combined.pop(window.index, ()))
        if combined > 1 and window.microbatches > 1 and not self.host.combines_on_purpose():
            self.report(combined_often(combined, window.microbatches, window.steps_taken))

    def _divides_itself(self) -> bool:
        pending = self.session.pending
        return pending is not None and bool(pending.views) and all(view.user_power < 0 for view in pending.views)


def bypassed(skipped: tuple[str, ...], divides_itself: bool) -> Finding:
    """Word a ``loss.backward()`` that leaves out what the framework's own backward does.

    Args:
        skipped: What was left out, in words.
        divides_itself: Whether the loss is divided by ``K`` already.
    """
    left_out = " and ".join(skipped)
    seen = f"loss.backward() ran where the framework's own backward was due, so this was left out: {left_out}."
    harmless = divides_itself and len(skipped) == 1 and "division" in skipped[0]
    return BackwardBypassed.finding(seen, certainty="info" if harmless else "certain")


def combined_often(combined: int, microbatches: int, optimizer_step: int) -> Finding:
    """Word reductions that the window did not need."""
    seen = f"gradients were combined over the ranks {combined} times in a window of {microbatches} microbatches."
    return SyncEveryMicrobatch.finding(seen, certainty="info", optimizer_step=optimizer_step)
