"""What lies right below a reduction: masks, weights, constants, and reductions inside the reduction."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import Node

from accum_plugin.loss_graph._counts import Inner, valid_targets
from accum_plugin.loss_graph._leaves import parameters_only
from accum_plugin.loss_graph._path import PASSES
from accum_plugin.loss_graph._values import dims_of, number, saved, scale_of

_PICKS = frozenset("IndexBackward0 IndexSelectBackward0 MaskedSelectBackward0 SliceBackward0 SelectBackward0".split())


def scan(node: Node | None, sizes: tuple[int, ...], wants_masks: bool) -> Inner:
    """Follow the elementwise chain below a reduction until it ends in the unit losses.

    Args:
        node: The node under the reduction.
        sizes: Shape of the tensor that is reduced.
        wants_masks: Whether to collect masks and weights.
    """
    inner = Inner(tuple(sizes), wants_masks)
    while node is not None:
        name = node.name()
        if name in PASSES:
            node = node.next_functions[0][0]
            continue
        step = _STEPS.get(name)
        if step is None:
            break
        node = step(inner, node)
    return inner


def _is_scalar(constant: Tensor, sizes: tuple[int, ...]) -> bool:
    # In a microbatch of one element a mask has one element too: only its dims tell it from a number.
    return constant.dim() == 0 or (constant.numel() == 1 and math.prod(sizes) > 1)


def _mul(inner: Inner, node: Node) -> Node | None:
    first, second = (child for child, _ in node.next_functions)
    if first is not None and second is not None:
        inner.squared = first is second
        return None
    constant, child = (saved(node, "self"), second) if first is None else (saved(node, "other"), first)
    if _is_scalar(constant, inner.sizes):
        inner.scales.append(scale_of(constant))
        return child
    inner.direct = False
    if inner.wants_masks:
        # A parameter times data is a prediction, not a mask.
        if parameters_only(child):
            return None
        inner.add_mask(constant)
    return child


def _div(inner: Inner, node: Node) -> Node | None:
    (first, _), (second, _) = node.next_functions
    if first is None or second is not None:
        return None
    divisor = saved(node, "other")
    if _is_scalar(divisor, inner.sizes):
        inner.scales.append(scale_of(divisor, divides=True))
        return first
    # sum(l * mask, 0) / mask.sum(0) below a weighted sum: a hand-written mean over dim 0.
    if inner.wants_masks and not inner.direct and first.name() == "SumBackward1":
        sizes = first._saved_self_sym_sizes
        if 0 in dims_of(first, len(sizes)):
            inner.batch_count, inner.sizes = number(divisor.amax()), tuple(sizes)
    return None


def _number_op(divides: bool) -> Callable[[Inner, Node], Node | None]:
    def step(inner: Inner, node: Node) -> Node | None:
        inner.scales.append(scale_of(node._saved_other, divides))
        return node.next_functions[0][0]

    return step


def _offset(inner: Inner, node: Node) -> Node | None:
    (first, _), (second, _) = node.next_functions
    if first is None or second is None:
        return second if first is None else first
    # Label smoothing of unreduced losses adds its two parts here; both share one mask of valid targets.
    if inner.wants_masks and first.name() == second.name() == "MulBackward1":
        return first.next_functions[0][0]
    return None


def _through(inner: Inner, node: Node) -> Node | None:
    return node.next_functions[0][0]


def _pick(inner: Inner, node: Node) -> Node | None:
    # What was picked is already counted by the number of elements; masks below belong to other sizes.
    inner.wants_masks = False
    return node.next_functions[0][0]


def _where(inner: Inner, node: Node) -> Node | None:
    (first, _), (second, _) = node.next_functions
    if first is not None and second is not None:
        return None
    if inner.wants_masks:
        condition = saved(node, "condition")
        inner.add_mask(condition if second is None else ~condition)
    return second if first is None else first


def _masked_fill(inner: Inner, node: Node) -> Node | None:
    if inner.wants_masks:
        inner.add_mask(~saved(node, "mask"))
    return node.next_functions[0][0]


def _nll(inner: Inner, node: Node) -> Node | None:
    # Where the code has its own mask, that is what it counts by.
    if inner.wants_masks and not inner.masks:
        valid = valid_targets(node)
        weight = saved(node, "weight")
        if weight is not None:
            inner.add_mask(weight[saved(node, "target").clamp(min=0)] * valid)
        inner.add_mask(valid)
    return None


def _ctc(inner: Inner, node: Node) -> Node | None:
    if inner.wants_masks and isinstance(node._saved_target_lengths, tuple):
        inner.counts.append(sum(node._saved_target_lengths))
    return None


def _pow(inner: Inner, node: Node) -> Node | None:
    inner.squared = node._saved_exponent == 2
    return None


def _mse(inner: Inner, node: Node) -> Node | None:
    inner.squared = True
    return None


def _sum_dims(inner: Inner, node: Node) -> Node | None:
    sizes = node._saved_self_sym_sizes
    reduced = math.prod(sizes[dim] for dim in dims_of(node, len(sizes)))
    # sum(l, 1) / l.shape[1] is the mean of each row written out: part of the unit loss, no divisor of the loss.
    last = inner.scales[-1] if inner.scales else None
    if last is not None and last.divides and last.integral and not isinstance(last.value, Tensor):
        if last.value == reduced:
            inner.scales.pop()
    if inner.wants_masks:
        inner.shapes.append(inner.sizes)
        inner.sizes = tuple(sizes)
    return node.next_functions[0][0]


def _mean_dims(inner: Inner, node: Node) -> Node | None:
    sizes = tuple(node._saved_self_sym_sizes)
    dims = dims_of(node, len(sizes))
    if 0 in dims:
        inner.batch_count, inner.sizes = math.prod(sizes[dim] for dim in dims), sizes
    # A mean over other dims makes a row the unit: masks below choose among its elements, not among rows.
    inner.wants_masks = False
    return node.next_functions[0][0]


_STEPS: dict[str, Callable[[Inner, Node], Node | None]] = {
    "MulBackward0": _mul,
    "MulBackward1": _number_op(divides=False),
    "DivBackward0": _div,
    "DivBackward1": _number_op(divides=True),
    "AddBackward0": _offset,
    "SubBackward0": _offset,
    "RsubBackward0": _offset,
    "AddBackward1": _through,
    "SubBackward1": _through,
    "RsubBackward1": _through,
    "NegBackward0": _through,
    "WhereBackward0": _where,
    "MaskedFillBackward0": _masked_fill,
    "NllLossBackward0": _nll,
    "NllLoss2DBackward0": _nll,
    "CtcLossBackward0": _ctc,
    "PowBackward0": _pow,
    "MseLossBackward0": _mse,
    "SumBackward1": _sum_dims,
    "MeanBackward1": _mean_dims,
    **dict.fromkeys(_PICKS, _pick),
}
