"""What every neighbor of the gradient is: an observer of the events around an optimizer's window."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from accum_plugin.boundary import AccumulationError
from accum_plugin.finding import Finding

if TYPE_CHECKING:
    from accum_plugin.host import Host
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow


@dataclasses.dataclass(frozen=True)
class Clip:
    """One call that clips gradients.

    Args:
        threshold: Largest norm, or largest value, that is left alone.
        norm: The norm that was seen, before clipping; ``None`` where values are clipped.
    """

    threshold: float
    norm: Tensor | None = None


class Neighbor:
    """Watches one thing beside the gradient; every event is optional.

    Args:
        session: The session whose windows it watches. It only reads.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def host(self) -> Host:
        """The framework's side."""
        return self.session.host

    def report(self, finding: Finding) -> None:
        """Report what was seen before a step; in ``mode="raise"`` a new, certain finding stops the run."""
        new = self.session.log.is_new(finding)
        self.session.report(finding)
        if new and finding.certainty == "certain" and self.session.settings.mode == "raise":
            raise AccumulationError([finding])

    def before_backward(self) -> None:
        """A backward pass of a watched optimizer's loss is about to run."""

    def entered(self, window: OptimizerWindow) -> None:
        """A backward pass has contributed to the window; it is ``window.backwards[-1]``."""

    def clipping(self, window: OptimizerWindow, clip: Clip) -> None:
        """The window's gradients are about to be clipped."""

    def stepping(self, window: OptimizerWindow) -> None:
        """The optimizer is about to step (it may still be skipped for an fp16 overflow)."""

    def stepped(self, window: OptimizerWindow) -> None:
        """The optimizer has stepped; the window's books are still open."""

    def epoch_ended(self) -> None:
        """The training data has come to its end; they may begin anew."""

    def finish(self) -> None:
        """Training has come to its regular end."""

    def standing(self) -> list[Finding]:
        """Findings that hold if training ends here; only asked for between epochs."""
        return []

    def remove(self) -> None:
        """Take everything back that was installed."""
