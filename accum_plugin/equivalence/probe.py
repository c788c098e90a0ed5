"""The split probe: what kind of loss is this, told from its values alone.

The loss of a batch is compared with the losses of its parts, forward only. A mean over examples is the weighted average
of its parts (degree 0 in the batch), a sum their sum (degree 1); anything else compares examples with each other. Rows
are never duplicated: a contrastive loss and BatchNorm pass that test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.equivalence.batches import CannotSplit, batch_size, map_tensors, split_batch
from accum_plugin.equivalence.controlled import (
    Rounding,
    batch_statistics_layers,
    freeze_batch_statistics,
    open_compiled,
    random_layers_off,
)
from accum_plugin.equivalence.untouched import one_process, random_state, same_random_state, undisturbed

__all__ = ["ProbeVerdict", "open_compiled", "split_probe"]

Kind = Literal["mean", "sum", "coupled", "unknown"]
#: Rounding units by which a loss that is a mean or a sum may miss; generous, since coupling is far larger.
TOLERANCE = 64


@dataclasses.dataclass(frozen=True)
class ProbeVerdict:
    """What the split probe found.

    Args:
        kind: ``"mean"`` (degree 0 in the batch), ``"sum"`` (degree 1), ``"coupled"`` (the loss of an example depends on
            the others), ``"unknown"`` (the probe cannot tell; ``reason`` says why).
        residual: By how much the best of mean and sum misses the loss, relative to the losses' size.
        reason: What was seen, in words.
        examples: Examples in the batch; 0 where that is unknown.
        by_examples: Whether a mean weighs its parts by their examples; else by units that differ between examples.
        batch_statistics: Whether BatchNorm layers are what couples the examples.
        frozen_residual: The residual with BatchNorm layers in evaluation mode, where that was tried.
        tolerance: The residual below which a loss counts as a mean or a sum.
    """

    kind: Kind
    residual: float = math.nan
    reason: str = ""
    examples: int = 0
    by_examples: bool = True
    batch_statistics: bool = False
    frozen_residual: float | None = None
    tolerance: float = math.nan

    @property
    def degree(self) -> int | None:
        """0 for a mean, 1 for a sum, ``None`` for everything else."""
        return {"mean": 0, "sum": 1}.get(self.kind)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; a residual that is not a number becomes ``None``."""
        data = dataclasses.asdict(self)
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in data.items()}


class _Unreadable(Exception):
    """Why the losses of the parts cannot be compared."""


def split_probe(
    loss_fn: Callable[[Any], Any],
    batch: Any,
    *,
    modules: Sequence[nn.Module] = (),
    units: Callable[[Any], Any] | None = None,
) -> ProbeVerdict:
    """Tell a mean-like, a sum-like and a coupled loss apart by splitting ``batch``.

    Runs ``loss_fn`` three times on a plain mean or sum, and up to fifteen times more on parts where it is neither,
    without gradients, compiled code opened, dropout off, and on a world of one process, so that ranks need not call
    it together. Leaves no trace in ``modules`` or the random state.

    Args:
        loss_fn: Returns the scalar loss of one batch.
        batch: Any nesting that :func:`~accum_plugin.equivalence.batches.split_batch` can cut.
        modules: Every module that ``loss_fn`` runs; what is not named cannot be put back.
        units: Units (valid tokens, pairs) in a batch, where the loss is a mean over those; without it they are told
            from three parts, which needs at least three examples.

    Returns:
        The verdict; every failure is one of kind ``"unknown"``, never an exception.
    """
    try:
        with undisturbed(modules), one_process(), torch.no_grad(), open_compiled(), random_layers_off(modules):
            for module in modules:
                if isinstance(module, DistributedDataParallel):
                    module.broadcast_buffers = False  # a forward pass must not wait for other ranks
            return _probe(loss_fn, batch, modules, units)
    except (CannotSplit, _Unreadable) as error:
        return ProbeVerdict("unknown", reason=str(error), examples=batch_size(batch) or 0)
    except Exception as error:  # the user's own code; a probe must not hurt the run
        return ProbeVerdict("unknown", reason=f"the loss could not be run on a part of the batch: {error!r}")


def _probe(loss_fn: Any, batch: Any, modules: Sequence[nn.Module], units: Any) -> ProbeVerdict:
    num_examples = batch_size(batch)
    split_batch(batch, 0, 1)  # raises where the batch cannot be cut
    if num_examples is None or num_examples < 2:
        return ProbeVerdict("unknown", reason="a batch of one example has no halves", examples=num_examples or 0)
    losses = _Losses(loss_fn, batch, modules, units)
    if not batch_statistics_layers(modules):
        return _judge(losses, num_examples)
    halves = _judge_halves(losses, num_examples)
    if halves.kind != "coupled":
        return halves
    freeze_batch_statistics(modules)
    frozen = _judge(_Losses(loss_fn, batch, modules, units), num_examples)
    if frozen.kind == "unknown":
        return frozen
    cause = frozen.kind in ("mean", "sum")
    reason = f"BatchNorm normalizes over the batch; frozen, the loss is a {frozen.kind}" if cause else frozen.reason
    return dataclasses.replace(halves, batch_statistics=cause, frozen_residual=frozen.residual, reason=reason)


class _Losses:
    """The losses of parts of one batch, each run from the same random state and counters."""

    def __init__(self, loss_fn: Any, batch: Any, modules: Sequence[nn.Module], units: Any) -> None:
        self._loss_fn, self._batch, self._modules, self._units = loss_fn, batch, modules, units
        self._known: dict[tuple[int, int], float] = {}
        self._rounding = Rounding()

    def __call__(self, start: int, stop: int) -> float:
        """Return the loss of examples ``start`` to ``stop``."""
        if (start, stop) not in self._known:
            self._known[start, stop] = self._run(start, stop)
        return self._known[start, stop]

    def _run(self, start: int, stop: int) -> float:
        part = map_tensors(split_batch(self._batch, start, stop), torch.clone)  # a loss may change its batch
        with undisturbed(self._modules):
            before = random_state()
            with self._rounding:
                loss = self._loss_fn(part)
            if not same_random_state(before, random_state()):
                raise _Unreadable("the loss draws random numbers outside of dropout layers: its parts are other draws")
        value = torch.as_tensor(loss)
        if value.numel() != 1 or not bool(torch.isfinite(value).all()):
            raise _Unreadable(f"the loss is not one finite number: {loss!r:.200}")
        self._rounding.dtypes.add(value.dtype if value.dtype.is_floating_point else torch.float32)
        return float(value)

    @property
    def tolerance(self) -> float:
        """The relative error that rounding explains."""
        return min(0.1, TOLERANCE * self._rounding.epsilon(self._modules))

    def average(self, start: int, middle: int, stop: int) -> float:
        """Return the average of the losses of two parts, weighted by their units."""
        one, two = self.units(start, middle), self.units(middle, stop)
        if one + two == 0.0:
            raise _Unreadable("units= counts none in the batch")
        return (one * self(start, middle) + two * self(middle, stop)) / (one + two)

    def units(self, start: int, stop: int) -> float:
        """Return the units that the user counts in examples ``start`` to ``stop``; examples without a count."""
        if self._units is None:
            return float(stop - start)
        return float(self._units(split_batch(self._batch, start, stop)))


def _judge(losses: _Losses, num_examples: int) -> ProbeVerdict:
    verdict = _judge_halves(losses, num_examples)
    if verdict.kind != "coupled":
        return verdict
    ragged = _miss_of_ragged_mean(losses, num_examples)
    if ragged is None:
        reason = "a mean over units that differ between examples looks like a coupled loss here; give units="
        return dataclasses.replace(verdict, kind="unknown", reason=reason)
    if ragged <= losses.tolerance:
        reason = "the loss is an average of its parts' losses, weighted by something else than examples"
        return dataclasses.replace(verdict, kind="mean", residual=ragged, by_examples=False, reason=reason)
    return verdict


def _judge_halves(losses: _Losses, num_examples: int) -> ProbeVerdict:
    half = num_examples // 2
    whole, one, two = losses(0, num_examples), losses(0, half), losses(half, num_examples)
    size = max(abs(whole), abs(one), abs(two))
    if size == 0.0:
        raise _Unreadable("the loss is zero on the batch and on both halves")
    mean = abs(whole - losses.average(0, half, num_examples)) / size
    total = abs(whole - one - two) / size
    tolerance, residual = losses.tolerance, min(mean, total)
    kind: Kind = "coupled"
    reason = f"the loss of the batch is neither the average nor the sum of its parts' losses ({residual:.2g} off)"
    if residual <= tolerance:
        if max(mean, total) <= tolerance:
            raise _Unreadable("the loss is both the average and the sum of its halves' losses; try another batch")
        kind, word = ("mean", "average") if mean < total else ("sum", "sum")
        reason = f"the loss of the batch is the {word} of its halves' losses"
    return ProbeVerdict(kind, residual, reason, num_examples, tolerance=tolerance)


def _miss_of_ragged_mean(losses: _Losses, num_examples: int) -> float | None:
    """Return by how much the loss misses an average of three parts whose weights are unknown.

    With parts a, b, c of ``u`` units each, ``l(ab) = (u_a l(a) + u_b l(b)) / (u_a + u_b)`` gives ``u_b / u_a``, and
    ``l(bc)`` gives ``u_c / u_b``; the loss of the whole batch follows, and nothing is left to choose. ``None`` where
    the parts are too few or too alike to tell.
    """
    for first, second in _cuts(num_examples):
        a, b, c = losses(0, first), losses(first, second), losses(second, num_examples)
        ab, bc, whole = losses(0, second), losses(first, num_examples), losses(0, num_examples)
        size = max(map(abs, (a, b, c, ab, bc, whole)))
        slack = losses.tolerance * size
        outside = max(_outside(ab, a, b), _outside(bc, b, c))
        if outside > slack:
            return outside / size
        if min(abs(a - b), abs(b - c)) < 100 * slack:  # parts that are alike do not show their weights
            continue
        weight_b = _weight(a, b, ab)
        weights = (1.0, weight_b, weight_b * _weight(b, c, bc))
        if not all(map(math.isfinite, weights)):
            continue
        missed = abs(whole - sum(w * loss for w, loss in zip(weights, (a, b, c))) / sum(weights))
        rounding = slack * (1.0 + size / abs(a - b) + size / abs(b - c))  # the weights' own error
        return missed / size if missed > rounding else 0.0
    return None


def _cuts(num_examples: int) -> Iterator[tuple[int, int]]:
    """Yield a few ways to cut ``num_examples`` in three parts."""
    for first in (num_examples // 3, 1, num_examples // 2):
        second = first + max(1, (num_examples - first) // 2)
        if 0 < first < second < num_examples:
            yield first, second


def _weight(one: float, two: float, both: float) -> float:
    """Return ``u_two / u_one`` where ``both`` is the average of ``one`` and ``two`` weighted by ``u``."""
    rest = both - two
    return abs(one - both) / abs(rest) if rest else math.inf


def _outside(value: float, one: float, two: float) -> float:
    """By how much ``value`` lies outside of what averages of ``one`` and ``two`` can be."""
    return max(0.0, min(one, two) - value, value - max(one, two))
