"""The entrance: one loss in, one reading out."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor
from torch.autograd.graph import Node

from accum_plugin.loss_graph._leaves import compares_examples
from accum_plugin.loss_graph._path import peel
from accum_plugin.loss_graph._values import LossReading, Term, UnreadableLoss, saved
from accum_plugin.loss_graph._walk import read

_MAX_TERMS = 64


def read_loss(loss: Tensor, *, loss_scale: Tensor | None = None, uncoupled: Container[str] = ()) -> LossReading:
    """Read how a scalar loss is normalized from its autograd graph.

    Nothing is computed again and nothing waits for a device; counts that live on one stay there. Call it before
    ``backward()``, which frees what is read.

    Args:
        loss: The tensor on which ``backward()`` will run.
        loss_scale: The scale tensor of a GradScaler; a multiplication by it is no part of the reading.
        uncoupled: Keys of terms that are known not to compare examples: they are not searched again.

    Returns:
        The terms of the loss, or the reason why it cannot be read.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> reading = read_loss((torch.ones(5, 3) @ weight).pow(2).mean() / 4)
        >>> [(term.key, term.units, term.scales[0].value) for term in reading.terms]
        [('div/mean', (5,), 4)]
    """
    node = loss.grad_fn
    if node is None:
        return LossReading((), "the loss does not require gradients")
    if loss.numel() != 1:
        return LossReading((), f"the loss is not one number but has shape {tuple(loss.shape)}")
    output_nr = loss.output_nr
    try:
        if loss_scale is not None:
            node, output_nr = _without_loss_scale(node, output_nr, loss_scale)
        terms = read(node, output_nr, "", ())
        for term in terms:
            if term.below and term.key not in uncoupled and any(compares_examples(*place) for place in term.below):
                term.kind = "coupled"
        return LossReading(_checked(terms))
    except UnreadableLoss as error:
        return LossReading((), str(error), error.opaque)


def _checked(terms: list[Term]) -> tuple[Term, ...]:
    if len(terms) > 1:
        if len(terms) > _MAX_TERMS:
            raise UnreadableLoss(f"the loss adds up {len(terms)} terms that are not alike; {_MAX_TERMS} are read")
        places = {(term.node, term.output_nr) for term in terms if term.node is not None}
        if len(places) < sum(term.node is not None for term in terms):
            raise UnreadableLoss("one reduction enters the loss along several paths")
    return tuple(terms)


def _without_loss_scale(node: Node, output_nr: int, loss_scale: Tensor) -> tuple[Node, int]:
    """Step over the outermost multiplication where it is the one by AMP's loss scale."""
    start = node, output_nr
    node, output_nr = peel(node, output_nr)
    if node.name() == "MulBackward0":
        first, second = node.next_functions
        if first[0] is None or second[0] is None:
            factor = saved(node, "self" if first[0] is None else "other")
            if _same_scale(factor, loss_scale):
                return second if first[0] is None else first
    return start


def _same_scale(factor: Tensor, loss_scale: Tensor) -> bool:
    if factor.data_ptr() == loss_scale.data_ptr():
        return True
    return factor.is_cpu and loss_scale.is_cpu and factor.dim() == 0 and factor.tolist() == loss_scale.tolist()
