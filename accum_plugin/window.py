"""One optimizer's current accumulation window: what contributed to it and what became of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from accum_plugin.ledger import Ledger
from accum_plugin.normalization import TermView
from accum_plugin.sentinel import Sentinel
from accum_plugin.taps import norm_tap


@dataclasses.dataclass(slots=True)
class Backward:
    """One backward pass: the microbatch it belongs to and what its loss says."""

    microbatch: int
    signature: str
    views: tuple[TermView, ...]
    applied: tuple[float | Tensor, ...]
    examples: float | None = None
    consumed: bool = False  # another optimizer has stepped on it


class OptimizerWindow:
    """The window of one optimizer, from its last step to its next.

    Args:
        optimizer: The PyTorch optimizer.
        index: Its place among the run's optimizers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self.optimizer = optimizer
        self.index = index
        self.sentinel = Sentinel(self.parameters())
        self.ledger = Ledger()
        self.steps_taken = 0
        self.resumed_at = 0  # steps taken before this run went on with saved counters
        self.steps_skipped = 0
        self.microbatches_total = 0
        self.clips_inside = False  # a clip turned out not to be the window's end: no later one is taken for it
        self.steps_early = False  # stepped while the framework said that its window goes on
        self.in_step = False  # between the optimizer's pre-hook and its post-hook
        self.stepping = False  # inside the optimizer's step, which calls a closure
        self.restart()

    def restart(self) -> None:
        """Open the next window."""
        self.ledger.start_window()
        self.sentinel.start_window()
        self.backwards: list[Backward] = []
        self.cleared: list[Backward] = []
        self.closed_by_clip = False
        self.clipped = self.clipped_midway = False  # midway: another contribution came after it
        self.boundary_factor: float | Tensor = 1.0  # what the boundary has multiplied the gradients by
        self.closed = False
        self.told = False  # the neighbours know that the step comes
        self.carries_over = False  # gradients of an earlier evaluation are still there
        self.grad_norm: Tensor | float | None = None
        self.correction = 1.0
        self.pending_record: dict[str, Any] | None = None

    def go_on(self) -> None:
        """A backward pass comes after the clip that closed the window: take the boundary back."""
        if not isinstance(self.boundary_factor, float) or self.boundary_factor != 1.0:
            self.scale_gradients(1.0 / self.boundary_factor)
        self.clips_inside = True
        self.closed = self.closed_by_clip = self.told = False
        self.boundary_factor = 1.0
        self.grad_norm = self.pending_record = None

    def state_dict(self) -> dict[str, int]:
        """Counters; the open window's microbatches are counted, since a resumed run goes on behind them."""
        total = self.microbatches_total + self.microbatches
        return {"steps_taken": self.steps_taken, "steps_skipped": self.steps_skipped, "microbatches_total": total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with saved counters."""
        for name, value in state.items():
            setattr(self, name, int(value))
        self.resumed_at = self.steps_taken

    @property
    def age(self) -> int:
        """Steps taken in this run."""
        return self.steps_taken - self.resumed_at

    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def grads(self) -> list[Tensor]:
        """The gradients the optimizer is about to see."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    @property
    def microbatches(self) -> int:
        """Distinct microbatches that contributed to the window on this rank."""
        return len({backward.microbatch for backward in self.backwards})

    def enter(self, backward: Backward) -> None:
        """Book a backward pass that contributed to this optimizer's gradients."""
        if self.sentinel.cleared:
            self.drop_contributions()
        known = {entry.microbatch for entry in self.backwards}
        self.backwards.append(backward)
        for view, applied in zip(backward.views, backward.applied):
            self.ledger.add(view, applied)
        if backward.microbatch not in known and backward.examples is not None:
            self.ledger.examples += backward.examples

    def take_step(self) -> None:
        """The optimizer has stepped on the window: count it and open the next."""
        self.steps_taken += 1
        self.microbatches_total += self.microbatches
        self.restart()

    def skip_step(self) -> None:
        """The window's step was left out (fp16 overflow): count that and open the next."""
        self.steps_skipped += 1
        self.microbatches_total += self.microbatches
        self.restart()

    def drop_contributions(self) -> None:
        """The gradients so far were cleared: begin the books anew, and remember what was lost."""
        self.sentinel.cleared = False
        self.cleared += [entry for entry in self.backwards if not entry.consumed]
        self.backwards = []
        self.ledger.start_window()

    @property
    def lost(self) -> list[Backward]:
        """Cleared contributions of a loss that also contributed after the clearing."""
        kept = {entry.signature for entry in self.backwards}
        return [entry for entry in self.cleared if entry.signature in kept]

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient of the optimizer in place: one pass."""
        dense = [g for g in self.grads() if g.layout is torch.strided]
        for group in _by_device_and_dtype(dense):
            torch._foreach_mul_(group, factor)
        for grad in self.grads():
            if grad.layout is not torch.strided:
                grad.mul_(factor)

    def measure_norm(self) -> None:
        """Compute the gradient's 2-norm as ``clip_grad_norm_`` would, unless it is known already."""
        if self.grad_norm is None:
            grads = self.grads()
            norm = norm_tap.original(grads, 2.0) if grads else 0.0
            self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded: of all shards


def _by_device_and_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
