"""The gradient account: a few gradient elements, followed from backward to the optimizer step.

A tensor hook on a small parameter adds up this rank's contributions over the window. At the step, the sum of all
ranks' contributions is compared with what stands in ``.grad``: their ratio is everything that happened in between.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WATCHED = 2  # parameters followed at a time
ELEMENTS = 2  # gradient elements followed of each; WATCHED * ELEMENTS numbers travel in the boundary all-reduce
SLOTS = WATCHED * ELEMENTS
OFTEN, SELDOM = 8, 16  # other parameters after every window at first, later after this many


def is_plain(grad: Tensor | None) -> bool:
    """Whether ``grad`` is there, dense, and whole on this rank (neither sparse nor a sharded ``DTensor``)."""
    return grad is not None and not hasattr(grad, "device_mesh") and grad.layout is torch.strided


class _Watch:
    """One parameter's hook and what it has seen since the window began.

    Args:
        sentinel: Whose watch it is.
        parameter: The parameter to follow.
        index: Its place among the optimizer's parameters.
        offset: Flat index of the first element to follow.
    """

    __slots__ = ("fired", "index", "offset", "parameter", "parts", "_handle", "_sentinel")

    def __init__(self, sentinel: Sentinel, parameter: Tensor, index: int, offset: int) -> None:
        self.parameter = parameter
        self.index = index
        self.offset = offset
        self._sentinel = sentinel
        self.forget()
        self._handle = parameter.register_hook(self._observe)

    def forget(self) -> None:
        """Start the count anew."""
        self.fired = False
        self.parts: list[list[float] | Tensor] = []

    def read(self, tensor: Tensor) -> list[float] | Tensor:
        """Copy the followed elements: to the host where they live there, else on their device."""
        if tensor.is_contiguous():  # one operation instead of two: this runs at every microbatch
            size = min(ELEMENTS, tensor.numel() - self.offset)
            part = tensor.as_strided((size,), (1,), tensor.storage_offset() + self.offset)
        else:
            part = tensor.reshape(-1)[self.offset : self.offset + ELEMENTS]
        return part.tolist() if part.is_cpu else part.to(torch.float64, copy=True)

    def total(self) -> list[float]:
        """Contributions of this window, added up element by element."""
        return [sum(column) for column in zip(*map(_listed, self.parts))]

    def magnitude(self) -> list[float]:
        """Sizes of the contributions, added up element by element."""
        return [sum(map(abs, column)) for column in zip(*map(_listed, self.parts))]

    def _observe(self, grad: Tensor) -> None:  # returns None: a value would replace the gradient
        sentinel = self._sentinel
        try:
            if grad.layout is not torch.strided:
                return
            before = self.parameter.grad
            if before is None:
                if self.fired:
                    sentinel.note_cleared(self)
            elif sentinel.inspect and before.layout is torch.strided and before.is_cpu:
                sentinel.note_before(self, before)
            self.parts.append(self.read(grad.detach()))
            self.fired = sentinel.fired = True
        except Exception as error:  # never let an observer break a backward pass
            sentinel.error = error

    def remove(self) -> None:
        """Take the hook off the parameter."""
        self._handle.remove()


class Sentinel:
    """Follows ``SLOTS`` gradient elements of an optimizer's parameters through each window.

    Args:
        parameters: The optimizer's parameters, in its order (the same on every data-parallel rank).
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._order = sorted(range(len(self._parameters)), key=lambda i: self._parameters[i].numel())
        self._turn = self._windows = 0
        self._watches: list[_Watch] = []
        self.error: Exception | None = None
        self.inspect = True
        self.start_window()
        self._watch(self._order[:1] + self._order[-1:] if len(self._order) > 1 else self._order)

    def start_window(self) -> None:
        """Forget the window that ended."""
        self.fired = False
        self.cleared = False
        self.reduced_midway = False
        self.stale = False
        for watch in self._watches:
            watch.forget()

    def take_fired(self) -> bool:
        """Whether a backward pass reached a followed parameter since the last call."""
        fired, self.fired = self.fired, False
        return fired

    def note_cleared(self, watch: _Watch) -> None:
        """Forget contributions that were cleared before they reached a step; what survives is counted anew."""
        self.cleared = True
        self.stale = False
        watch.forget()

    def note_all_cleared(self) -> None:
        """Start anew inside the window: what stood in the gradients, stale or not, is gone."""
        self.stale = False
        for watch in self._watches:
            watch.forget()

    def rescale(self, factor: float) -> None:
        """Follow a multiplication of the gradients that are accumulated so far."""
        for watch in self._watches:
            watch.parts = [[value * factor for value in _listed(part)] for part in watch.parts]

    def note_before(self, watch: _Watch, grad: Tensor) -> None:
        """Compare ``.grad`` before a contribution with this rank's own contributions so far.

        Before the first it should be empty; what is there is stale. Later it should be their sum: nothing means that
        they were cleared, something else that the ranks were combined in mid-window.
        """
        now = _listed(watch.read(grad.detach()))
        if not watch.fired:
            self.stale = self.stale or any(now)
            return
        mine, sizes = watch.total(), watch.magnitude()
        tolerance = 64 * torch.finfo(grad.dtype).eps
        if not any(now) and any(abs(a) > tolerance * b for a, b in zip(mine, sizes)):
            self.note_cleared(watch)
        elif any(abs(a - b) > tolerance * c for a, b, c in zip(now, mine, sizes)):
            self.reduced_midway = True

    def sample(self, read: bool = True) -> tuple[list[float], list[float], list[float], float]:
        """Return this rank's contributions, ``.grad``, the sum of the contributions' sizes, and an identity.

        The first three have ``SLOTS`` elements each; what is not there (no gradient, a sparse or sharded one)
        is zero. The identity is equal on ranks that follow the same elements.

        Args:
            read: Whether a host-device synchronization is allowed; without it, what lives on an accelerator is
                left out (zeros).
        """
        mine, grads, sizes = [], [], []
        for watch in self._watches:
            grad = watch.parameter.grad
            known = watch.fired and is_plain(grad) and (read or grad.is_cpu)
            mine += _padded(watch.total() if known else [])
            sizes += _padded(watch.magnitude() if known else [])
            grads += _padded(_listed(watch.read(grad.detach())) if known else [])
        missing = [0.0] * (SLOTS - len(mine))
        identity = float(sum((w.index + 1) * 1009 + w.offset for w in self._watches))
        return mine + missing, grads + missing, sizes + missing, identity

    @property
    def epsilon(self) -> float:
        """Rounding unit of the coarsest gradient that is followed."""
        kinds = [w.parameter.dtype for w in self._watches if w.parameter.dtype.is_floating_point]
        return max((torch.finfo(kind).eps for kind in kinds), default=0.0)

    def rotate(self) -> None:
        """Follow other parameters in the next windows, so that in time each that gets gradients is covered."""
        if len(self._order) <= WATCHED and all(w.parameter.numel() <= ELEMENTS for w in self._watches):
            return
        self._windows += 1
        if self._windows > OFTEN and self._windows % SELDOM:
            return
        self._turn += 1
        alive = [i for i in self._order if self._parameters[i].grad is not None] or self._order
        start = (self._turn * WATCHED) % len(alive)
        self._watch([alive[(start + k) % len(alive)] for k in range(min(WATCHED, len(alive)))])

    def _watch(self, indices: list[int]) -> None:
        self.remove()
        for index in dict.fromkeys(indices):
            parameter = self._parameters[index]
            room = max(1, parameter.numel() - ELEMENTS + 1)
            self._watches.append(_Watch(self, parameter, index, (self._turn * 7919) % room))

    def remove(self) -> None:
        """Take every hook off the parameters."""
        for watch in self._watches:
            watch.remove()
        self._watches = []


def _padded(values: list[float]) -> list[float]:
    return values + [0.0] * (ELEMENTS - len(values))


def _listed(part: list[float] | Tensor) -> list[float]:
    return part.tolist() if isinstance(part, Tensor) else part
