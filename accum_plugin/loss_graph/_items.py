"""Losses that are added up: one term each, or, where all are written alike, one term together."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import Node

from accum_plugin.loss_graph._values import Number, Scale, Term, UnreadableLoss, same_scales

Scales = tuple[Scale, ...]


def read_items(
    read: Callable[..., list[Term]],
    node: Node,
    items: list[tuple[Node, int]],
    path: str,
    scales: Scales,
    averaged: bool = False,
) -> list[Term]:
    """Read the items of a sum of losses.

    Items that are alike become one term in three cases: divided by an int equal to their number (the mean of a list,
    an item is a unit); all of them sums (a sum in pieces); all of them penalties. Otherwise each stays a term of its
    own, told apart by its place: eight summed means are a declared objective.

    Args:
        read: Reads the terms below one edge, ``read(node, output_nr, path, scales)``.
        node: The node that adds the items up.
        items: Edges to them.
        path: Operations from the loss to ``node``.
        scales: Scalars from the loss to ``node``.
        averaged: Whether the innermost scale is the list's own mean, and so no division for accumulation.
    """
    read_alone = [part(read, *item, "", ()) for item in items]
    alone_terms = [terms[0] for terms in read_alone if len(terms) == 1]
    together = _together(node, alone_terms, len(items), path, scales)
    if together is not None and (averaged or together.kind != "mean"):
        return [together]
    terms = []
    for index, alone in enumerate(read_alone):
        for term in alone:
            term.key, term.scales = f"{path}add.{index}/{term.key}", scales + term.scales
            terms.append(term)
    if together is None:
        return terms
    together.parts = tuple(terms)
    return [together]


def part(read: Callable[..., list[Term]], node: Node, output_nr: int, path: str, scales: Scales) -> list[Term]:
    """Read one summand; where it cannot be read, it is not the whole loss that comes out of it."""
    try:
        return read(node, output_nr, path, scales)
    except UnreadableLoss as error:
        raise UnreadableLoss(str(error)) from error


def _together(node: Node, terms: list[Term], count: int, path: str, scales: Scales) -> Term | None:
    if len(terms) < count or not _alike(terms):
        return None
    first = terms[0]
    if first.kind == "penalty":
        return Term(f"{path}add/penalty", "penalty", first.reduction, (1,), scales, node, 0)
    if not all(same_scales(first.scales, term.scales) for term in terms):
        return None
    squared, below = first.value_squared, tuple(place for term in terms for place in term.below)
    divisor = _list_divisor(scales, count)
    if divisor is not None and first.kind in ("mean", "sum"):
        kept = scales[:divisor] + scales[divisor + 1 :] + first.scales
        label = f"mean of a list of {first.reduction}"
        return Term(f"{path}add/{first.key}", "mean", label, (count,), kept, node, 0, count, squared, below)
    if first.kind == "sum":
        units = tuple(_total(counts) for counts in zip(*(term.units for term in terms), strict=False))
        rows = sum(term.rows or 0 for term in terms)
        scales = scales + first.scales
        return Term(f"{path}add/{first.key}", "sum", first.reduction, units, scales, node, 0, rows, squared, below)
    return None


def _alike(terms: list[Term]) -> bool:
    first = terms[0]
    if first.kind == "penalty":
        return all(term.kind == "penalty" for term in terms)
    return all(term.key == first.key and term.kind == first.kind for term in terms)


def _list_divisor(scales: Scales, count: int) -> int | None:
    """Return the place of the innermost scale that divides by an int equal to the number of items."""
    for place in range(len(scales) - 1, -1, -1):
        scale = scales[place]
        if scale.divides and scale.integral and not isinstance(scale.value, Tensor) and scale.value == count:
            return place
    return None


def _total(counts: tuple[Number, ...]) -> Number:
    return sum(counts[1:], counts[0])
