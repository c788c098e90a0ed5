"""What a reading is made of, and how numbers are taken out of a graph without a device synchronization."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

Number = float | Tensor
"""A host number where the host knows it, else a 0-dim tensor that stays on its device."""


_WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


class UnreadableLoss(Exception):
    """The graph holds something the walk has no rule for; the message says what, in plain words.

    Args:
        reason: What it is.
        opaque: The unreadable part as a term of kind ``"opaque"``, where the whole loss comes out of it.
    """

    def __init__(self, reason: str, opaque: Term | None = None) -> None:
        super().__init__(reason)
        self.opaque = opaque


@dataclasses.dataclass(slots=True)
class Scale:
    """One scalar between the loss and its reduction, as written.

    Args:
        value: 4 for ``/ 4``, 0.25 for ``* 0.25``, -1 for ``-x``.
        divides: Whether the loss is divided by ``value`` rather than multiplied.
        integral: Whether it was written as a whole number: a Python int, or a tensor of an integer type.
    """

    value: Number
    divides: bool
    integral: bool


@dataclasses.dataclass(slots=True)
class Term:
    """One summand of a loss: a reduction and every scalar that multiplies it.

    Args:
        key: The operations from the loss to the reduction, for example ``"add.0/div/nll(mean)"``. Free of numbers
            that change with the data, so that it names the same term at every microbatch.
        kind: ``"mean"`` (divides by its own count), ``"sum"`` (does not), ``"penalty"`` (depends on parameters only;
            once per microbatch), ``"coupled"`` (compares examples, or is not linear in the unit losses).
        reduction: A short label for people, for example ``"cross_entropy(mean)"``.
        units: Candidate counts of units, best first. A mean has exactly one: the count it divides by. A penalty
            and a nonlinear function of a scalar count as one unit.
        scales: Outermost (nearest the loss) first, without AMP's loss scale. A scalar met right below the reduction
            (``(l / n).sum()``) is the innermost.
        node: The node whose incoming gradient belongs to this term alone: ``node.register_prehook`` scales the term.
            ``None`` where no such node exists (a bare parameter added to the loss).
        output_nr: Which output of ``node``.
        rows: Size of dim 0 of the tensor that is reduced, or ``None`` where it has no dims.
        value_squared: Whether what is reduced is a squared error.
        below: Each node under a reduction, and whether the reduction is itself nonlinear in it: where examples that are
            compared with each other would show.
        parts: Where a division was taken for the length of a list of losses, the losses as terms of their own.
    """

    key: str
    kind: str
    reduction: str
    units: tuple[Number, ...]
    scales: tuple[Scale, ...]
    node: Node | None
    output_nr: int
    rows: int | None = None
    value_squared: bool = False
    below: tuple[tuple[Node, bool], ...] = ()
    parts: tuple[Term, ...] = ()


@dataclasses.dataclass(slots=True)
class LossReading:
    """What the graph says about one loss.

    Args:
        terms: The summands; empty where the loss is unreadable.
        unreadable: Why it could not be read, in plain words, or ``None``.
        opaque: Where all of an unreadable loss comes out of one node: that node, under the scalars that could be read,
            as a term of kind ``"opaque"`` without units.
    """

    terms: tuple[Term, ...]
    unreadable: str | None = None
    opaque: Term | None = None

    def told_apart(self, numbers: Container[int] | None) -> LossReading:
        """Read lists of losses as separate terms where the division by their length may be another one.

        Args:
            numbers: What else a loss is divided by: accumulation steps, ranks; ``None``: any number.
        """
        terms: list[Term] = []
        for term in self.terms:
            length = len(term.parts)
            other = numbers is None or length in numbers
            terms += term.parts if term.parts and other and _divided_by(term.parts[0], length) < 2 else [term]
        return dataclasses.replace(self, terms=tuple(terms))

    @property
    def signature(self) -> str:
        """The joined term keys: equal for two losses that were written alike."""
        return " + ".join([term.key for term in self.terms])


def same_scales(first: tuple[Scale, ...], second: tuple[Scale, ...]) -> bool:
    """Whether two paths hold the same scalars; how they were written (2 or 2.0) does not matter."""
    return len(first) == len(second) and all(map(_same_scale, first, second))


def _same_scale(first: Scale, second: Scale) -> bool:
    if first.divides != second.divides:
        return False
    a, b = first.value, second.value
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        # Values on a device are not compared, only their place in memory.
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.data_ptr() == b.data_ptr()
    return a == b


def _divided_by(term: Term, number: int) -> int:
    """How often a number stands among a term's divisors."""
    return sum(s.divides and not isinstance(s.value, Tensor) and s.value == number for s in term.scales)


def saved(node: Node, name: str) -> Any:
    """Return what ``node`` saved under ``name`` (a tensor or ``None``).

    Raises:
        UnreadableLoss: If unpacking it would run a hook. Activation checkpointing recomputes the forward pass there,
            and offloading copies between devices: a reading must do neither.
    """
    raw = getattr(node, "_raw_saved_" + name)
    if getattr(raw, "unpack_hook", None) is not None:
        raise UnreadableLoss(
            f"the loss comes out of {node.name()}, whose saved tensors are packed away (activation checkpointing or "
            "offloading around the loss)"
        )
    return getattr(node, "_saved_" + name)


def number(value: Any) -> Number:
    """Return a one-element ``value`` as a host number, or, where it lives on a device, as a 0-dim tensor."""
    if not isinstance(value, Tensor):
        return value
    if value.dim():
        value = value.reshape(())
    return value.tolist() if value.is_cpu else value


def scale_of(value: Any, divides: bool = False) -> Scale:
    """Return the scale that multiplying (or dividing) by the one-element ``value`` is."""
    value = number(value)
    if isinstance(value, Tensor):
        return Scale(value, divides, value.dtype in _WHOLE)
    return Scale(value, divides, type(value) is int)


def shape_of(node: Node, output_nr: int = 0) -> tuple[int, ...]:
    """Return the shape of the tensor that ``node`` put out."""
    return tuple(node._input_metadata[output_nr].shape)


def dims_of(node: Node, ndim: int) -> list[int]:
    """Return the dims that a reduction over dims runs over, counted from the front (all, where it names none)."""
    dims = node._saved_dim
    dims = range(ndim) if not dims and dims != 0 else (dims,) if isinstance(dims, int) else dims
    # The graph hands out negative dims as unsigned 64-bit numbers.
    return [((dim + 2**63) % 2**64 - 2**63) % max(ndim, 1) for dim in dims]
