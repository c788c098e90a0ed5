"""ACC206: which GradScaler scaled what, and whether its scale changes inside a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accum_plugin.neighbors.base import Neighbor
from accum_plugin.rules.boundary import AmpOrder
from accum_plugin.taps import scaler_taps

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import Backward, OptimizerWindow


class Scaling(Neighbor):
    """Follows every GradScaler of the process: the framework's and the user's own."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pending: torch.amp.GradScaler | None = None  # has scaled a loss whose backward pass is still to come
        self._scaler: torch.amp.GradScaler | None = None  # scaled the latest loss that was run backward
        self._updated: dict[int, tuple[Backward, Tensor]] = {}
        for tap in scaler_taps:
            tap.add(self)

    def remove(self) -> None:
        """Stop listening to scalers."""
        for tap in scaler_taps:
            tap.discard(self)

    # -- what the taps tell -----------------------------------------------------------------------------------------

    def scaling(self, scaler: torch.amp.GradScaler) -> None:
        """``scaler.scale()`` was called."""
        if scaler.is_enabled():
            self._pending = scaler

    def scaler_stepped(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """``scaler.step()`` has returned: a window that is still open was left out for an overflow."""
        window = self.session.window_of(optimizer)
        if window is not None and window.backwards and scaler.is_enabled() and self.session.failed is None:
            with self.session.guard():
                window.skip_step()

    def updating(self, scaler: torch.amp.GradScaler) -> None:
        """``scaler.update()`` is about to run: windows that hold its contributions are still open."""
        if scaler is not self._scaler or self.session.failed is not None:
            return
        for window in self.session.windows:
            if window.backwards and scaler._scale is not None:
                self._updated[window.index] = window.backwards[0], scaler._scale.clone()

    # -- the window -------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the loss at hand."""
        scaler = self._pending or self._scaler
        return None if scaler is None else scaler._scale

    def left_in(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """The scale that an optimizer's gradients still carry; ``None`` where there is none or it was taken out."""
        scaler = self._scaler
        if scaler is None or scaler._scale is None:
            return None
        state = scaler._per_optimizer_states.get(id(optimizer))
        ready = state is None or state["stage"].name == "READY"
        return scaler._scale if ready else None

    def before_backward(self) -> None:
        """The loss at hand was scaled by the scaler that was called last, or by none."""
        self._scaler, self._pending = self._pending, None

    def entered(self, window: OptimizerWindow) -> None:
        """A contribution: was the scaler updated since the one before it in this window?"""
        first, before = self._updated.pop(window.index, (None, None)) if self._updated else (None, None)
        if first is not None and first is window.backwards[0] and self._scaler is not None:
            self._report(window, before, self._scaler._scale)

    def _report(self, window: OptimizerWindow, before: Tensor, after: Tensor) -> None:
        old, new = float(before.tolist()), float(after.tolist())
        changed = f"went from {old:g} to {new:g}" if old != new else f"stayed at {old:g} this time"
        seen = f"scaler.update() was called between two microbatches of one window (the scale {changed})."
        certainty = "certain" if old != new else "suspected"
        self.report(AmpOrder.finding(seen, certainty=certainty, optimizer_step=window.steps_taken, cause="update"))
