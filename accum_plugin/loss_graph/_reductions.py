"""What each reduction divides by and counts. One reader per kind of autograd node."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.autograd.graph import Node

from accum_plugin.loss_graph._counts import Inner, distinct, leading, mask_count, valid_targets
from accum_plugin.loss_graph._inner import scan
from accum_plugin.loss_graph._leaves import parameters_only
from accum_plugin.loss_graph._path import peel
from accum_plugin.loss_graph._values import Number, Scale, Term, UnreadableLoss, number, saved, shape_of

_ARITHMETIC = frozenset(f"{name}Backward{i}" for name in ("Add", "Sub", "Rsub", "Mul", "Div", "Neg") for i in range(2))
_REDUCTIONS = ("none", "mean", "sum")  # torch.nn.functional's own numbering


def read_nll(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read ``nll_loss`` (and so cross-entropy); a target is a unit, weighted by its class.

    A mean divides by ``total_weight``: the class weights of the targets that are not ``ignore_index``.
    """
    child, output_nr = node.next_functions[0]
    how = _reduction_of(node)
    shape = shape_of(child, output_nr)
    label = "cross_entropy" if child.name() == "LogSoftmaxBackward0" else "nll"
    return Term(
        key=f"{path}nll({how})",
        kind=how,
        reduction=f"{label}({how})",
        units=_nll_units(node, how),
        scales=scales,
        node=node,
        output_nr=0,
        rows=shape[0] if len(shape) > 1 else 1,
        below=((child, True),),
    )


def _nll_units(node: Node, how: str) -> tuple[Number, ...]:
    total = number(saved(node, "total_weight"))
    if how == "mean":
        return (total,)
    counts = [total]
    if saved(node, "weight") is not None:
        counts.append(number(valid_targets(node).count_nonzero()))
    shape = saved(node, "target").shape
    return distinct([*counts, shape.numel(), *leading(shape)])


def smoothed_nll(node: Node) -> Node | None:
    """Return the likelihood node of a label-smoothed cross-entropy whose last addition is ``node``, else ``None``.

    torch composes it as ``(1 - eps) * nll + (eps / C) * smooth``, where both parts have one normalizer; the two
    factors give it away: ``(1 - eps) + C * (eps / C) = 1`` with ``C`` classes.
    """
    (first, _), (second, _) = node.next_functions
    if first is None or second is None or not (first.name() == second.name() == "MulBackward1"):
        return None
    nll, smooth = first.next_functions[0][0], second.next_functions[0][0]
    if nll.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    if nll._saved_reduction == 1:
        smooth = smooth.next_functions[0][0]
    classes = shape_of(*nll.next_functions[0])
    classes = classes[1] if len(classes) > 1 else classes[0]
    whole = first._saved_other + classes * second._saved_other
    return nll if smooth.name() == "SumBackward0" and abs(whole - 1.0) < 1e-9 else None


def read_fused(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read a loss that torch reduces in one node with a ``reduction`` argument (MSE, BCE, Huber and kin)."""
    label, by_row = FUSED[node.name()]
    how = _reduction_of(node)
    edge = node.next_functions[0] if node.next_functions[0][0] is not None else node.next_functions[1]
    shape = shape_of(*edge)
    # Margin losses over classes have one value per row: (N, C) is N units, (C,) is one.
    sizes = (shape[:1] if len(shape) > 1 else ()) if by_row else shape
    numel = math.prod(sizes)
    units: list[Number] = [numel]
    if how == "sum":
        weight = saved(node, "weight") if label.startswith("bce") else None
        count = None if weight is None else mask_count(weight, numel)
        units = [*([] if count is None else [count]), numel, *leading(sizes)]
    return Term(
        key=f"{path}{label}({how})",
        kind=how,
        reduction=f"{label}({how})",
        units=distinct(units),
        scales=scales,
        node=node,
        output_nr=0,
        rows=sizes[0] if sizes else 1,
        value_squared=label == "mse",
        below=((edge[0], True),),
    )


def read_mean(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read a mean over a whole tensor; the unit is one of its elements."""
    sizes = tuple(node._saved_self_sym_sizes)
    return _read_plain(node, "mean", sizes, path, scales)


def read_sum(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read a sum over a whole tensor; masks and weights below it say what it counts."""
    sizes = tuple(node._saved_self_sym_sizes)
    return _read_plain(node, "sum", sizes, path, scales)


def read_nansum(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read ``nansum`` (and so ``nanmean``): it counts the elements that are not NaN."""
    values = saved(node, "self")
    counts = (number(values.isnan().logical_not().count_nonzero()), *leading(values.shape)[::-1])
    units, rows = distinct(counts), _rows(values.shape)
    return Term(f"{path}nansum", "sum", "sum of what is not NaN", units, scales, node, 0, rows)


def read_dot(node: Node, path: str, scales: tuple[Scale, ...]) -> Term:
    """Read ``torch.dot``: a sum weighted by the operand that is not in the graph."""
    (first, _), (second, _) = node.next_functions
    if parameters_only(node):
        return penalty(node, f"{path}dot", scales)
    (size,) = shape_of(first, 0) if first is not None else shape_of(second, 0)
    counts: list[Number] = [size]
    if first is None or second is None:
        weights = mask_count(saved(node, "self" if first is None else "tensor"), size)
        counts = [size] if weights is None else [weights, size]
    return Term(f"{path}dot", "sum", "weighted sum", distinct(counts), scales, node, 0, size, first is second)


def penalty(node: Node, key: str, scales: tuple[Scale, ...]) -> Term:
    """Return the term of a value that depends on parameters only: the same at every microbatch, counted once."""
    return Term(key, "penalty", "penalty on parameters", (1,), scales, node, 0)


def _read_plain(node: Node, how: str, sizes: tuple[int, ...], path: str, scales: tuple[Scale, ...]) -> Term:
    child = node.next_functions[0][0]
    if parameters_only(child):
        return penalty(node, path + how, scales)
    if len(sizes) == 1 and _lists_losses(child):
        raise UnreadableLoss(f"the loss is a {how} of a weighted list of losses: nothing says what each of them counts")
    inner = scan(child, sizes, wants_masks=how == "sum")
    kind, units = _mean_units(inner, sizes) if how == "mean" else _sum_units(inner)
    return Term(
        key=path + ("masked sum" if inner.masks else how),
        kind=kind,
        reduction="masked sum" if inner.masks else how,
        units=units,
        scales=scales + tuple(inner.scales),
        node=node,
        output_nr=0,
        rows=_rows(sizes if inner.batch_count is None else inner.sizes),
        value_squared=inner.squared,
        below=((child, False),) if inner.batch_count is None and child is not None else (),
    )


def _lists_losses(node: Node | None) -> bool:
    """Whether arithmetic on a list of losses that are reduced already (uncertainty weights) is what is reduced here."""
    nodes, visited = [node], 0
    while nodes and visited < 16:
        node = nodes.pop()
        visited += 1
        if node is None:
            continue
        if node.name() == "StackBackward0":
            item = node.next_functions[0][0]
            return len(shape_of(node)) == 1 and item is not None and peel(item, 0)[0].name() in READERS
        if node.name() in _ARITHMETIC:
            nodes += [child for child, _ in node.next_functions]
    return False


def _mean_units(inner: Inner, sizes: tuple[int, ...]) -> tuple[str, tuple[Number, ...]]:
    if inner.batch_count is None:
        return "mean", (math.prod(sizes),)
    # A mean over columns of a mean over dim 0 is the mean of all; with weights in between, only dim 0 is a mean.
    return "mean", (math.prod(sizes) * inner.batch_count if inner.direct else inner.batch_count,)


def _sum_units(inner: Inner) -> tuple[str, tuple[Number, ...]]:
    if inner.batch_count is None:
        return "sum", inner.candidates()
    # Mixture-of-experts balance: sum(f * p.mean(0)) averages over the batch, whatever is outside.
    return "mean", (inner.batch_count,)


def _reduction_of(node: Node) -> str:
    how = _REDUCTIONS[node._saved_reduction]
    if how == "none":
        raise UnreadableLoss(f"the loss is one unreduced value of {node.name()}: nothing says what it counts")
    return how


def _rows(sizes: tuple[int, ...]) -> int | None:
    return sizes[0] if sizes else None


# label, and whether a row rather than an element is the unit
FUSED: dict[str, tuple[str, bool]] = {
    "MseLossBackward0": ("mse", False),
    "SmoothL1LossBackward0": ("smooth_l1", False),
    "HuberLossBackward0": ("huber", False),
    "BinaryCrossEntropyBackward0": ("bce", False),
    "BinaryCrossEntropyWithLogitsBackward0": ("bce_with_logits", False),
    "SoftMarginLossBackward0": ("soft_margin", False),
    "MultiMarginLossBackward0": ("multi_margin", True),
    "MultilabelMarginLossBackward0": ("multilabel_margin", True),
}

READERS: dict[str, Callable[[Node, str, tuple[Scale, ...]], Term]] = {
    "NllLossBackward0": read_nll,
    "NllLoss2DBackward0": read_nll,
    "MeanBackward0": read_mean,
    "MeanBackward1": read_mean,
    "SumBackward0": read_sum,
    "SumBackward1": read_sum,
    "NansumBackward0": read_nansum,
    "DotBackward0": read_dot,
    **dict.fromkeys(FUSED, read_fused),
}
