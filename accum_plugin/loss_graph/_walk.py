"""The scalar path: from the loss down to its reductions, through arithmetic, casts and wrappers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import Node

from accum_plugin.loss_graph._items import part, read_items
from accum_plugin.loss_graph._leaves import LEAF, parameters_only
from accum_plugin.loss_graph._path import peel
from accum_plugin.loss_graph._reductions import READERS, penalty, read_nll, smoothed_nll
from accum_plugin.loss_graph._values import Scale, Term, UnreadableLoss, saved, scale_of, shape_of

_MAX_ITEMS = 1024

_LISTS = frozenset(("StackBackward0", "CatBackward0"))
_PLAIN = frozenset(("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"))

_NONLINEAR = {
    f"{name}Backward{i}": name.lower()
    for i in range(4)
    for name in (
        "Sqrt Rsqrt Log Log2 Log10 Log1P Exp Expm1 Pow Abs Clamp ClampMin ClampMax Relu Softplus Sigmoid LogSigmoid "
        "Tanh Reciprocal Maximum Minimum Max Min Norm LinalgVectorNorm Logsumexp Var Std Amax Amin"
    ).split()
}

Scales = tuple[Scale, ...]


def read(node: Node, output_nr: int, path: str, scales: Scales, owner: Node | None = None) -> list[Term]:
    """Read the terms below one node of the scalar path.

    Args:
        node: Where to go on.
        output_nr: Which of its outputs.
        path: Operations from the loss to here, each followed by a slash.
        scales: Scalars from the loss to here.
        owner: The node just above, where it belongs to this path alone.
    """
    node, output_nr = peel(node, output_nr)
    name = node.name()
    reader = READERS.get(name)
    if reader is not None:
        return _reduction(node, name, reader, path, scales)
    step = _STEPS.get(name)
    if step is not None:
        return step(node, path, scales)
    if name in _NONLINEAR:
        return [_nonlinear(node, path + _NONLINEAR[name], _NONLINEAR[name], scales)]
    if name in ("SelectBackward0", "UnbindBackward0", LEAF) and parameters_only(node):
        # A hook on the parameter itself would scale what other terms contribute to it as well.
        return [penalty(owner if name == LEAF else node, path + "parameter", scales)]
    reason = f"the loss comes out of {name}{_REASONS.get(name, ', which is not a reduction known here')}"
    whole = name not in ("SelectBackward0", "UnbindBackward0", LEAF)
    opaque = Term(f"{path}opaque({name})", "opaque", name, (), scales, node, output_nr) if whole else None
    raise UnreadableLoss(reason, opaque)


_REASONS = {
    "CompiledFunctionBackward": ", a compiled function, which hides how the loss is reduced",
    "SelectBackward0": ": it is one element of a larger tensor",
    "UnbindBackward0": ": it is one element of a larger tensor",
    LEAF: " on a tensor that is no parameter",
}


def _reduction(node: Node, name: str, reader: Callable, path: str, scales: Scales) -> list[Term]:
    if name in _PLAIN:
        child, output_nr = peel(*node.next_functions[0])
        sizes = node._saved_self_sym_sizes
        if child.name() in _LISTS and len(sizes) == 1 and len(child.next_functions) == sizes[0]:
            return _listed(node, child, name, path, scales)
        # The mean of what is one number already (a gathered or unsqueezed loss) only passes it on.
        if not sizes or (max(sizes) == min(sizes) == 1 and shape_of(child, output_nr) == ()):
            return read(child, output_nr, path, scales)
    return [reader(node, path, scales)]


def _listed(node: Node, child: Node, name: str, path: str, scales: Scales) -> list[Term]:
    """Read ``stack(losses)`` under a sum or mean: the same as adding them up, and dividing by their number."""
    items = child.next_functions
    averaged = name.startswith("Mean")
    if averaged:
        scales = (*scales, Scale(len(items), True, True))
        path += "mean/"
    return read_items(read, node, [item for item in items if item[0] is not None], path, scales, averaged)


def _add(node: Node, path: str, scales: Scales) -> list[Term]:
    if node._saved_alpha != 1:
        return _pair(node, "add", 1, node._saved_alpha, path, scales)
    nll = smoothed_nll(node)
    if nll is not None:
        term = read_nll(nll, path, scales)
        term.node, term.reduction = node, term.reduction.replace("(", " smoothed(")
        return [term]
    return read_items(read, node, _summands(node), path, scales)


def _summands(root: Node) -> list[tuple[Node, int]]:
    """Return the edges of a chain of plain additions, in the order in which they were written."""
    items: list[tuple[Node, int]] = []
    edges = [(root, 0)]
    while edges:
        edge = peel(*edges.pop())
        node = edge[0]
        chained = node.name() == "AddBackward0" and node._saved_alpha == 1
        if chained and (node is root or smoothed_nll(node) is None):
            edges += [child for child in reversed(node.next_functions) if child[0] is not None]
            continue
        items.append(edge)
        if len(items) > _MAX_ITEMS:
            raise UnreadableLoss(f"the loss adds up more than {_MAX_ITEMS} values")
    return items


def _pair(node: Node, name: str, first: float, second: float, path: str, scales: Scales) -> list[Term]:
    """Read ``first * a + second * b``; an operand outside the graph adds nothing to the gradient."""
    terms: list[Term] = []
    # 1 - loss has one edge only: the number is no input of the node.
    for index, (factor, edge) in enumerate(zip((first, second), node.next_functions, strict=False)):
        if edge[0] is not None:
            inner = scales if factor == 1 else (*scales, scale_of(factor))
            terms += part(read, *edge, f"{path}{name}.{index}/", inner)
    return terms


def _sub(node: Node, path: str, scales: Scales) -> list[Term]:
    return _pair(node, "sub", 1, -node._saved_alpha, path, scales)


def _rsub(node: Node, path: str, scales: Scales) -> list[Term]:
    return _pair(node, "rsub", -node._saved_alpha, 1, path, scales)


def _through(node: Node, path: str, scales: Scales) -> list[Term]:
    return read(*node.next_functions[0], path, scales, node)


def _neg(node: Node, path: str, scales: Scales) -> list[Term]:
    return read(*node.next_functions[0], path + "neg/", (*scales, Scale(-1, False, True)), node)


def _mul(node: Node, path: str, scales: Scales) -> list[Term]:
    first, second = node.next_functions
    if second[0] is None:
        return _scaled(node, first, saved(node, "other"), False, path + "mul/", scales)
    if first[0] is None:
        return _scaled(node, second, saved(node, "self"), False, path + "mul/", scales)
    if parameters_only(second[0]):
        return _weighted(node, first, saved(node, "other"), False, path + "mul/", scales)
    if parameters_only(first[0]):
        return _weighted(node, second, saved(node, "self"), False, path + "mul/", scales)
    return [_nonlinear(node, path + "product", "product", scales)]


def _div(node: Node, path: str, scales: Scales) -> list[Term]:
    first, second = node.next_functions
    if second[0] is None:
        return _scaled(node, first, saved(node, "other"), True, path + "div/", scales)
    if first[0] is not None and parameters_only(second[0]):
        return _weighted(node, first, saved(node, "other"), True, path + "div/", scales)
    return [_nonlinear(node, path + "ratio", "ratio", scales)]


def _scaled(node: Node, edge: tuple[Node, int], value: Tensor, divides: bool, path: str, scales: Scales) -> list[Term]:
    if value.dim() and parameters_only(edge[0]):
        raise UnreadableLoss("the loss multiplies a parameter by data and reduces nothing: nothing says what it counts")
    return read(*edge, path, (*scales, scale_of(value, divides)), node)


def _weighted(
    node: Node, edge: tuple[Node, int], value: Tensor, divides: bool, path: str, scales: Scales
) -> list[Term]:
    """Read a loss under a learned coefficient; the coefficient's own gradient is part of the term."""
    if parameters_only(edge[0]):
        return [penalty(node, path + "parameter", scales)]
    terms = read(*edge, path, (*scales, Scale(scale_of(value).value, divides, False)))
    if len(terms) == 1:
        terms[0].node, terms[0].output_nr = node, 0
    return terms


def _mul_number(node: Node, path: str, scales: Scales) -> list[Term]:
    return read(*node.next_functions[0], path + "mul/", (*scales, scale_of(node._saved_other)), node)


def _div_number(node: Node, path: str, scales: Scales) -> list[Term]:
    return read(*node.next_functions[0], path + "div/", (*scales, scale_of(node._saved_other, True)), node)


def _nonlinear(node: Node, key: str, label: str, scales: Scales) -> Term:
    if parameters_only(node):
        return penalty(node, key, scales)
    return Term(key, "coupled", f"{label} of a reduced value", (1,), scales, node, 0)


_STEPS: dict[str, Callable[[Node, str, Scales], list[Term]]] = {
    "AddBackward0": _add,
    "SubBackward0": _sub,
    "RsubBackward0": _rsub,
    "RsubBackward1": _rsub,
    "AddBackward1": _through,
    "SubBackward1": _through,
    "NegBackward0": _neg,
    "MulBackward0": _mul,
    "MulBackward1": _mul_number,
    "DivBackward0": _div,
    "DivBackward1": _div_number,
}
