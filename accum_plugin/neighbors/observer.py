"""The one observer of what happens around the gradient; both frameworks' hosts tell it, and it holds no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from accum_plugin.finding import Finding
from accum_plugin.neighbors.backwards import Backwards
from accum_plugin.neighbors.base import Clip, Neighbor
from accum_plugin.neighbors.clipping import Clipping
from accum_plugin.neighbors.resume import Resume
from accum_plugin.neighbors.samplers import Repeats
from accum_plugin.neighbors.scaling import Scaling
from accum_plugin.neighbors.schedulers import Schedulers
from accum_plugin.neighbors.statistics import Statistics
from accum_plugin.neighbors.stepping import Leftovers, Stepping

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow


EVENTS = ("before_backward", "entered", "clipping", "stepping")  # at every microbatch or more often than once a window


class Neighbors:
    """Passes every event around a window on to those who watch for it.

    Args:
        session: The session whose windows are watched.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scaling = Scaling(session)
        self._backwards = Backwards(session)
        self.resume = Resume(session)
        self._all: tuple[Neighbor, ...] = (
            self._scaling,
            self._backwards,
            Clipping(session, self._scaling),
            Stepping(session),
            Leftovers(session),
            Schedulers(session),
            Statistics(session),
            Repeats(session),
            self.resume,
        )
        self._listening = {name: _who(self._all, name) for name in EVENTS}
        self.between_epochs = False

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the GradScaler that scaled the loss at hand, the framework's or the user's own."""
        return self._scaling.loss_scale

    @property
    def combined(self) -> bool:
        """Whether the latest backward pass left gradients that are combined over the ranks."""
        return self._backwards.combined

    def before_backward(self) -> None:
        """A backward pass of a watched optimizer's loss is about to run."""
        self.between_epochs = False
        for neighbor in self._listening["before_backward"]:
            neighbor.before_backward()

    def entered(self, window: OptimizerWindow) -> None:
        """A backward pass has contributed to the window."""
        for neighbor in self._listening["entered"]:
            neighbor.entered(window)

    def clipping(self, window: OptimizerWindow, clip: Clip) -> None:
        """The window's gradients are about to be clipped."""
        for neighbor in self._listening["clipping"]:
            neighbor.clipping(window, clip)

    def stepping(self, window: OptimizerWindow) -> None:
        """The optimizer is about to step."""
        for neighbor in self._listening["stepping"]:
            neighbor.stepping(window)

    def stepped(self, window: OptimizerWindow) -> None:
        """The optimizer has stepped; the window's books are still open."""
        for neighbor in self._all:
            neighbor.stepped(window)

    def epoch_ended(self) -> None:
        """The training data have come to their end."""
        self.between_epochs = True
        for neighbor in self._all:
            neighbor.epoch_ended()

    def finish(self) -> None:
        """Training has come to its regular end."""
        for neighbor in self._all:
            neighbor.finish()

    def standing(self) -> list[Finding]:
        """Findings that hold if training ends here; none in the middle of an epoch."""
        if not self.between_epochs or self._session.failed is not None:
            return []
        return [f for neighbor in self._all for f in neighbor.standing() if self._session.log.is_new(f)]

    def remove(self) -> None:
        """Take everything back that was installed."""
        for neighbor in self._all:
            neighbor.remove()


def _who(neighbors: tuple[Neighbor, ...], event: str) -> tuple[Neighbor, ...]:
    """Those who do something at an event: the others cost nothing."""
    return tuple(n for n in neighbors if getattr(type(n), event) is not getattr(Neighbor, event))
