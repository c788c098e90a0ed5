"""What a framework's adapter tells the session: the only place where the two meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accum_plugin.finding import Finding
from accum_plugin.loss_graph import LossReading
from accum_plugin.neighbors import Announcement, Clip, Neighbors, Padding, Run, Schedule
from accum_plugin.record import WindowRecord

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow


class Host:
    """The framework's side of a session; the defaults describe a loop that says nothing about itself.

    Attributes:
        divider: Who divides for accumulation, in words a user knows (``Trainer(accumulate_grad_batches=4)``).
        explicit: Whether the framework announces every microbatch before its backward pass.
        bypassed: Whether the backward pass that runs is the loop's own where the framework has one.
        replays_whole: Whether :meth:`replay` runs all of the user's loss, or only the part that a model computes.
        neighbors: Watches what happens around the gradient, while a session runs.
    """

    divider: str = "the framework"
    explicit: bool = False
    bypassed: bool = False
    replays_whole: bool = True
    neighbors: Neighbors | None = None

    # -- questions about the window ---------------------------------------------------------------------------------

    def steps(self) -> int:
        """Microbatches in a whole window as the framework is configured; 1 where it does not accumulate."""
        return 1

    def framework_divisor(self) -> int:
        """What the framework divides the loss of the coming backward pass by (1 for nothing)."""
        return 1

    def loss_scale(self) -> Tensor | None:
        """The gradient scaler's current scale, where one is in use: the one that scaled the loss at hand."""
        return None if self.neighbors is None else self.neighbors.loss_scale

    def step_expected(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether the window is meant to end here; ``None`` where the framework does not say."""
        return None

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the framework has just left out a step (fp16 overflow)."""
        return False

    def will_clip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the framework will compute the gradient's 2-norm itself after the boundary."""
        return False

    def repeated_examples(self) -> int:
        """Examples in this window, over all ranks, that are repeats added as padding by a sampler."""
        if not self.at_end_of_data():
            return 0
        padding = self.padding()
        return 0 if padding is None else padding.repeats

    def engine_goes_on(self) -> bool:
        """Whether an engine that accumulates by itself (DeepSpeed) calls this a step in the middle of its window."""
        return False

    def combined(self) -> bool:
        """Whether the latest backward pass left gradients that are combined over the ranks."""
        return self.neighbors is None or self.neighbors.combined

    # -- questions about its neighbors ------------------------------------------------------------------------------

    def announcement(self, optimizer: torch.optim.Optimizer) -> Announcement | None:
        """What the framework says about the window at this step; ``None`` where it says nothing."""
        return None

    def steps_at_the_end(self) -> bool:
        """Whether the framework itself steps on an incomplete window at the end of the data."""
        return False

    def at_end_of_data(self) -> bool:
        """Whether the microbatch at hand is the last of the training data."""
        return False

    def padding(self) -> Padding | None:
        """What a sampler repeats at the end of every epoch."""
        return None

    def skipped_by_bypass(self) -> tuple[str, ...]:
        """What the framework's own backward pass would have done that a plain ``loss.backward()`` leaves out."""
        return ()

    def combines_on_purpose(self) -> bool:
        """Whether the user asked for combining the ranks at every microbatch."""
        return False

    def schedules(self) -> list[Schedule]:
        """Schedulers that the framework advances."""
        return []

    def planned_run(self) -> Run | None:
        """The length of this training as configured; ``None`` where it is not known."""
        return None

    # -- the loss once more -----------------------------------------------------------------------------------------

    def loss_function(self) -> Callable[[Any], Any] | None:
        """The loss of a batch, as one process with one batch would compute it, where that can be run; else ``None``."""
        return None

    def replay(self, batch: Any) -> tuple[Callable[[Any], Any], Any] | None:
        """The loss of the microbatch at hand exactly as it was computed, as a function and what to call it with."""
        loss_fn = self.loss_function()
        return None if loss_fn is None else (loss_fn, batch)

    def modules(self) -> list[nn.Module]:
        """Every module that :meth:`loss_function` runs."""
        return []

    # -- events -----------------------------------------------------------------------------------------------------

    def started(self, session: Session) -> None:
        """The session has begun to listen."""
        self.neighbors = Neighbors(session)

    def stopped(self) -> None:
        """The session has stopped listening."""
        if self.neighbors is not None:
            self.neighbors.remove()

    def before_backward(self, loss: Tensor, reading: LossReading) -> None:
        """A backward pass is about to run; ``reading`` is what its loss says."""
        if self.neighbors is not None:
            self.neighbors.before_backward()

    def entered(self, window: OptimizerWindow) -> None:
        """A backward pass has contributed to the window."""
        if self.neighbors is not None:
            self.neighbors.entered(window)

    def clipping(self, window: OptimizerWindow, clip: Clip) -> None:
        """Gradients are about to be clipped."""
        if self.neighbors is not None:
            self.neighbors.clipping(window, clip)

    def stepping(self, window: OptimizerWindow) -> None:
        """The optimizer is about to step; the window's books are closed."""
        if self.neighbors is not None:
            self.neighbors.stepping(window)

    def stepped(self, window: OptimizerWindow) -> None:
        """The optimizer has stepped; the next window is about to open."""
        if self.neighbors is not None:
            self.neighbors.stepped(window)

    def state_dict(self) -> dict[str, Any]:
        """What belongs in a checkpoint beside the counters."""
        return {} if self.neighbors is None else self.neighbors.resume.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint holds."""
        if self.neighbors is not None:
            self.neighbors.resume.load_state_dict(state)

    def should_log(self, optimizer_step: int) -> bool:
        """Whether this optimizer step is one at which metrics are logged."""
        return False

    def announce(self, finding: Finding) -> None:
        """Tell the user about a new finding."""

    def record(self, record: WindowRecord, log: bool) -> None:
        """A window has ended in an optimizer step."""


def count_examples(batch: Any) -> int | None:
    """Size of the first dimension of the first tensor in a batch; ``None`` where there is none.

    Example:
        >>> count_examples({"x": torch.zeros(5, 3), "y": torch.zeros(5)})
        5
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, (str, bytes)):
        return None
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    return next((count for part in parts if (count := count_examples(part)) is not None), None)
