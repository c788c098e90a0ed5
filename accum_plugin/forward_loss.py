"""A loss computed inside the model's own forward pass, kept so that it can be run once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accum_plugin.equivalence.untouched import unwrapped
from accum_plugin.taps import ModuleHook


class ModelLoss:
    """Follows models whose output carries a ``loss`` (transformers' heads do).

    A hand-written loop that computes its loss outside the model shows nothing here: its loss cannot be run again.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handles: list[Any] = []

    def follow(self, model: nn.Module) -> None:
        """Watch a prepared model's forward passes."""
        self._handles.append(model.register_forward_hook(ModuleHook(self._forward), with_kwargs=True))

    def forget(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._model, self._call = [], None, None

    def _forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        loss = loss_of(output) if torch.is_grad_enabled() else None
        if loss is not None and loss.requires_grad:
            self._model, self._call = unwrapped(model), (args, kwargs)

    @property
    def of_batch(self) -> Callable[[Any], Any] | None:
        """The loss of a batch of keyword arguments, without what the loop adds to them; ``None`` if there is none."""
        model = self._model
        if model is None:
            return None
        return lambda batch: loss_of(model(**batch) if isinstance(batch, Mapping) else model(*batch))

    def replay(self) -> tuple[Callable[[Any], Any], Any] | None:
        """The latest forward pass as a function, and the arguments it was called with."""
        model, call = self._model, self._call
        if model is None or call is None:
            return None
        return (lambda call: loss_of(model(*call[0], **call[1]))), call


def loss_of(output: Any) -> Tensor | None:
    """Return the scalar loss that a model's output carries, or ``None``."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
