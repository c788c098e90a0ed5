"""ACC202 and ACC205: windows that are stepped on too early, or never."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from accum_plugin.finding import Finding
from accum_plugin.loss_graph import LossReading
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.normalization import close
from accum_plugin.rules.boundary import StepEveryMicrobatch, WindowNeverStepped

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow


@dataclasses.dataclass(frozen=True)
class Announcement:
    """What the framework says about the window at an optimizer step.

    Args:
        announced: Whether the loop tells the framework about its microbatches (``accumulate()``).
        ends: Whether the framework says that the window ends here.
        prepared: Whether the framework knows the optimizer, so that it could hold the step back.
        last_batch: Number of the loaded batch, where it is the loader's last and every microbatch of it steps.
    """

    announced: bool = False
    ends: bool = True
    prepared: bool = True
    last_batch: int | None = None


class Stepping(Neighbor):
    """Compares each optimizer step with what the framework says about the window."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._last_batch: dict[int, int | None] = {}

    def stepping(self, window: OptimizerWindow) -> None:
        """Report a step that comes before the window's end."""
        said = self.host.announcement(window.optimizer)
        if said is None or not said.announced or not window.backwards:
            return
        steps, microbatches = self.host.steps(), window.microbatches
        again = said.last_batch is not None and said.last_batch == self._last_batch.get(window.index)
        self._last_batch[window.index] = said.last_batch
        finding = None
        if not said.ends:
            finding = early_step(microbatches, steps, self.host.divider, said.prepared)
        elif again and microbatches < steps:
            finding = sliced_batch(microbatches, steps, self.host.divider)
        elif steps == 1 and microbatches == 1 and window.steps_taken < 2:
            finding = single_step(unexplained_divisor(self.session.pending_reading, self.session.reduction.num_ranks))
        if finding is not None:
            self.report(dataclasses.replace(finding, optimizer_step=window.steps_taken))


def early_step(microbatches: int, steps: int, divider: str, prepared: bool) -> Finding:
    """Word a step in the middle of a window."""
    seen = (
        f"the optimizer stepped after {microbatches} of {steps} microbatches, although the window goes on for "
        f"{divider}: the update has {microbatches}/{steps} of its gradient."
    )
    remedy = None if prepared else "Give the optimizer to accelerator.prepare(): only then step() waits for the window."
    return StepEveryMicrobatch.finding(seen, factor=microbatches / steps, remedy=remedy, cause="early")


def sliced_batch(microbatches: int, steps: int, divider: str) -> Finding:
    """Word a loader's last batch of which every slice steps."""
    seen = (
        f"the optimizer stepped more than once within the loader's last batch, after {microbatches} of {steps} "
        f"microbatches ({divider}): sync_with_dataloader ends the window at every slice of that batch."
    )
    remedy = (
        "A loop that splits one loaded batch into slices needs "
        f"GradientAccumulationPlugin(num_steps={steps}, sync_with_dataloader=False)."
    )
    return StepEveryMicrobatch.finding(seen, factor=microbatches / steps, remedy=remedy, cause="slices")


def single_step(divisor: int | None) -> Finding:
    """Word ``accumulate()`` without accumulation steps: harmless, unless the loss is divided for accumulation."""
    seen = "accumulate() is used, but the Accelerator has 1 accumulation step: the optimizer steps at every microbatch"
    if divisor is None:
        why = "This is as configured; it is a mistake only if accumulation was meant."
        return StepEveryMicrobatch.finding(
            f"{seen}.", certainty="info", evidence="configuration", why=why, remedy="", cause="single"
        )
    seen += f", while the loss is divided by {divisor} as if {divisor} microbatches were accumulated."
    remedy = f"Accelerator(gradient_accumulation_steps={divisor}), and leave the division to accelerator.backward()."
    return StepEveryMicrobatch.finding(
        seen, factor=1.0 / divisor, certainty="suspected", evidence="graph", remedy=remedy, cause="divided"
    )


def unexplained_divisor(reading: LossReading, num_ranks: int) -> int | None:
    """The whole number that a mean is divided by, which is no count, no number of ranks or terms, and no convention."""
    for term in reading.terms:
        counts = [units for units in term.units if not isinstance(units, Tensor)]
        divisors = [s.value for s in term.scales if s.divides and s.integral and not isinstance(s.value, Tensor)]
        others = [value for value in divisors if not any(close(units, value) for units in counts)]
        if term.kind != "mean" and len(others) == len(divisors):
            continue  # a sum: its divisor may be any normalizer
        for value in others:
            convention = value == num_ranks or value == len(reading.terms) or value == 2 and term.value_squared
            if value >= 2 and not convention:
                return int(value)
    return None


class Leftovers(Neighbor):
    """Follows microbatches that are in no step when the data end."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._left: dict[int, set[int]] = {}

    def epoch_ended(self) -> None:
        """Remember what is in the open windows: the next epoch may take it in or clear it."""
        self._left = {window.index: unstepped(window) for window in self.session.windows if unstepped(window)}

    def entered(self, window: OptimizerWindow) -> None:
        """A new window's contribution: what was left over and cleared is lost."""
        left = self._left.pop(window.index, None) if self._left else None
        if not left:
            return
        lost = [entry for entry in window.cleared if entry.microbatch in left]
        if lost:
            window.cleared = [entry for entry in window.cleared if entry not in lost]
            self.report(never_stepped(len(left), window, "when their gradients were cleared for the next epoch"))

    def finish(self) -> None:
        """Training ends: what is in the open windows is lost."""
        for finding in self._open_windows("when training ended"):
            self.session.report(finding)

    def standing(self) -> list[Finding]:
        """What would be lost if training ended now."""
        return self._open_windows("when the data ended")

    def _open_windows(self, when: str) -> list[Finding]:
        if self.host.steps_at_the_end():
            return []
        windows = [(window, len(unstepped(window))) for window in self.session.windows]
        return [never_stepped(count, window, when) for window, count in windows if count]


def unstepped(window: OptimizerWindow) -> set[int]:
    """Microbatches in an open window that no optimizer has stepped on."""
    return {entry.microbatch for entry in window.backwards if not entry.consumed}


def never_stepped(count: int, window: OptimizerWindow, when: str) -> Finding:
    """Word microbatches that were run for nothing."""
    what = "1 microbatch was" if count == 1 else f"{count} microbatches were"
    seen = f"{what} run backward and had reached no optimizer step {when} ({window.steps_taken} steps were taken)."
    return WindowNeverStepped.finding(
        seen, certainty="certain" if window.steps_taken else "suspected", optimizer_step=window.steps_taken
    )
