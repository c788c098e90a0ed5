"""The gradient that one process with one batch would get, without touching a parameter or its ``.grad``.

The model runs with stand-ins for its parameters: leaves that share the weights' memory. No hook of the real parameters
fires, no wrapper reduces anything, and rounding is measured by nudging the stand-ins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accum_plugin.equivalence.batches import CannotSplit, batch_size, map_tensors
from accum_plugin.equivalence.comparison import SAFETY, Reference, distance, flat, norm_squared
from accum_plugin.equivalence.controlled import Rounding
from accum_plugin.equivalence.untouched import random_state, same_random_state, seed_everything, unwrapped
from accum_plugin.taps import backward_tap

#: Draws of random layers that are averaged where they cannot be switched off on both sides.
DRAWS = 4
#: Standard deviations of one draw by which the real run, one draw itself, may miss their mean.
_DEVIATIONS = 4.0
NUDGES = 2
_SKETCH = 2**16


class CannotCheck(Exception):
    """Why the two gradients cannot be compared."""


class OneProcess:
    """Gradients of a window's microbatches as one batch on this process.

    Args:
        model: The model, wrapped or bare.
        parts: Every rank's microbatches, on this process's device.
        loss_fn: ``loss_fn(model, batch)``: the loss of one full batch.
        units: Units in a batch, for weighing microbatches that cannot be joined.
        normalization: ``"mean"`` or ``"sum"``: how such microbatches' losses add up.
        join: Makes one batch of several.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], Any],
        *,
        units: Callable[[Any], Any] | None,
        normalization: str,
        join: Callable[[list[Any]], Any],
    ) -> None:
        self.model, self.parts = unwrapped(model), list(parts)
        self._loss_fn = loss_fn
        self._units, self._normalization = units, normalization
        self._rounding = Rounding()
        if not self.parts:
            raise CannotCheck("the window holds no examples")
        if _is_sharded(self.model):
            raise CannotCheck("the parameters are sharded over ranks, so that no process holds the whole model")
        try:
            self.whole = join(self.parts)
            self._weights: list[float] | None = None
        except CannotSplit as error:
            self._weights = self._part_weights(error)

    def _part_weights(self, error: CannotSplit) -> list[float]:
        if self._normalization == "sum":
            return [1.0] * len(self.parts)
        if self._units is None:
            raise CannotCheck(f"the microbatches cannot be joined ({error}); give units=, or join=") from error
        units = [float(self._units(part)) for part in self.parts]
        if not sum(units):
            raise CannotCheck("units= counts none in the window")
        return [count / sum(units) for count in units]

    @property
    def joined(self) -> bool:
        """Whether the reference is one forward pass over all examples."""
        return self._weights is None

    def draws_random_numbers(self) -> bool:
        """Whether a forward pass draws random numbers, as the model stands; its rounding is noted too."""
        before = random_state()
        with self._rounding:
            self._loss_fn(self.model, _fresh(max(self.parts, key=lambda part: batch_size(part) or 0)))
        return not same_random_state(before, random_state())

    def reference(self, *, statistical: bool) -> Reference:
        """Return the one-process gradient and its measured noise.

        Args:
            statistical: Whether random layers act: the mean and spread of several draws, not of nudges.
        """
        epsilon = self._rounding.epsilon([self.model])
        floor = self._floor(epsilon)
        if statistical:
            return self._drawn(floor)
        exact = self.gradients()
        noise = [0.0] * len(exact)
        for seed in range(NUDGES):
            nudged = self.gradients(nudge=epsilon, seed=seed)
            noise = [max(old, distance(a, b)) for old, a, b in zip(noise, exact, nudged)]
        return Reference(exact, noise, floor)

    def gradients(self, *, nudge: float = 0.0, seed: int = 0) -> list[Tensor | None]:
        """Return the gradient of the window, one tensor per parameter."""
        weights = [1.0] if self._weights is None else self._weights
        batches = [self.whole] if self._weights is None else self.parts
        return self._run(list(zip(batches, weights)), nudge, seed)

    def sketch_of_part(self, index: int) -> Tensor:
        """Return sampled elements of the gradient of one microbatch alone (float64, on the CPU)."""
        return self.sketch(self._run([(self.parts[index], 1.0)]))

    def sketch(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return every so-many-th element of a gradient, zeros where a parameter has none."""
        parameters = list(self.model.parameters())
        step = math.ceil(sum(p.numel() for p in parameters) / _SKETCH) or 1
        pieces = []
        for parameter, grad in zip(parameters, gradients):
            pieces.append(flat(torch.zeros_like(parameter) if grad is None else grad)[::step].cpu())
        return torch.cat(pieces)

    def _floor(self, epsilon: float) -> float:
        """Return the relative error of the sums: partial sums in the coarse type, rows at least in float32."""
        rows = sum(batch_size(part) or 1 for part in self.parts)
        kept = min(epsilon, torch.finfo(torch.float32).eps)
        return 2.0 * epsilon * math.sqrt(len(self.parts)) + 4.0 * kept * math.sqrt(rows)

    def _drawn(self, floor: float) -> Reference:
        total: list[Tensor | None] = []
        squares: list[float] = []
        for seed in range(DRAWS):
            seed_everything(seed)
            drawn = [None if grad is None else grad.double() for grad in self.gradients()]
            squares = [old + norm_squared(grad) for old, grad in zip(squares or [0.0] * len(drawn), drawn)]
            total = [_sum(a, b) for a, b in zip(total or [None] * len(drawn), drawn)]
        mean = [None if grad is None else grad / DRAWS for grad in total]
        spread = [max(0.0, square - DRAWS * norm_squared(grad)) / (DRAWS - 1) for square, grad in zip(squares, mean)]
        return Reference(mean, [_DEVIATIONS / SAFETY * math.sqrt(value) for value in spread], floor, statistical=True)

    def _run(self, weighted: list[tuple[Any, float]], nudge: float = 0.0, seed: int = 0) -> list[Tensor | None]:
        """Return the gradient of the weighted losses of some batches."""
        for scale in (2.0**16, 2.0**12, 2.0**8, 1.0) if torch.float16 in self._rounding.dtypes else (1.0,):
            grads = self._run_scaled(weighted, scale, nudge, seed)
            if all(bool(torch.isfinite(flat(grad)).all()) for grad in grads if grad is not None):
                return grads
        raise CannotCheck("the one-process gradient is not finite")

    def _run_scaled(self, weighted: list[Any], scale: float, nudge: float, seed: int) -> list[Tensor | None]:
        originals = list(self.model.parameters())
        with _stand_ins(self.model, nudge, seed) as stand_ins:
            for batch, weight in weighted:
                nudged = map_tensors(batch, lambda tensor: _nudged(tensor, nudge, seed))
                loss = self._check(self._loss_fn(self.model, nudged)) * (weight * scale)
                backward_tap.original(loss)  # unheard: a session would take it for a microbatch
        grads = [_sum(stand_ins[p].grad if p in stand_ins else None, p.grad) for p in originals]
        for parameter in originals:  # has a gradient itself where the loss reaches it past the model (in a closure)
            parameter.grad = None
        return grads if scale == 1.0 else [None if grad is None else grad / scale for grad in grads]

    @staticmethod
    def _check(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise CannotCheck(f"the loss is not one number but {loss!r:.200}")
        if not bool(torch.isfinite(loss).all()):
            raise CannotCheck(f"the loss of the full batch is {loss.item()}")
        return loss.reshape(())


def _is_sharded(model: nn.Module) -> bool:
    if any(type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for module in model.modules()):
        return True
    return any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())  # FSDP2 and TP, ZeRO-3


@contextlib.contextmanager
def _stand_ins(model: nn.Module, nudge: float, seed: int) -> Iterator[dict[Tensor, Tensor]]:
    """Put fresh leaves in the places of the trainable parameters; tied weights get the same one."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    fresh: dict[Tensor, Tensor] = {}
    for _, _, parameter in places:
        if parameter not in fresh:
            fresh[parameter] = nn.Parameter(_nudged(parameter.detach(), nudge, seed, share=True))
    try:
        for module, name, parameter in places:
            setattr(module, name, fresh[parameter])
        yield fresh
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)
        torch.clear_autocast_cache()


def _nudged(tensor: Tensor, nudge: float, seed: int, share: bool = False) -> Tensor:
    """Return a copy with about half of its elements made smaller by ``nudge``, relatively.

    Whole numbers stay: a mask or a count that is kept as a float must keep its meaning. Values never grow, so that
    what lies in [0, 1] still does.
    """
    if not nudge or not tensor.is_floating_point():
        return tensor if share else tensor.clone()
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return torch.where(tensor == tensor.round(), tensor, tensor * (1.0 - nudge * moves))


def _fresh(batch: Any) -> Any:
    """Copy a batch: a loss may change what it is given."""
    return map_tensors(batch, torch.clone)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
