"""What a framework's adapter tells the session: the only place where the two meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accum_plugin.finding import Finding
from accum_plugin.loss_graph import LossReading
from accum_plugin.record import WindowRecord

if TYPE_CHECKING:
    from accum_plugin.window import OptimizerWindow


class Host:
    """The framework's side of a session; the defaults describe a loop that says nothing about itself.

    Attributes:
        divider: Who divides for accumulation, in words a user knows (``Trainer(accumulate_grad_batches=4)``).
        explicit: Whether the framework announces every microbatch before its backward pass.
    """

    divider: str = "the framework"
    explicit: bool = False

    def steps(self) -> int:
        """Microbatches in a whole window as the framework is configured; 1 where it does not accumulate."""
        return 1

    def framework_divisor(self) -> int:
        """What the framework divides the loss of the coming backward pass by (1 for nothing)."""
        return 1

    def loss_scale(self) -> Tensor | None:
        """The gradient scaler's current scale, where one is in use."""
        return None

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
        return 0

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

    def before_backward(self, loss: Tensor, reading: LossReading) -> None:
        """A backward pass is about to run; ``reading`` is what its loss says."""

    def entered(self, window: OptimizerWindow) -> None:
        """A backward pass has contributed to the window."""

    def clipping(self, window: OptimizerWindow, expected: bool | None) -> None:
        """Gradients are about to be clipped; ``expected`` is :meth:`step_expected`."""

    def stepped(self, window: OptimizerWindow) -> None:
        """The optimizer has stepped; the window is about to be closed."""

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
