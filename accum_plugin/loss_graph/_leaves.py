"""What lies at the bottom of a term: parameters alone, or examples that are compared with each other?

Both questions are asked at every microbatch, so both searches stop at the first node that settles them: the last layer
of a model, as a rule two or three nodes below the loss.
"""

from __future__ import annotations

from torch.autograd.graph import Node
from torch.nn import Parameter

from accum_plugin.loss_graph._values import UnreadableLoss, dims_of, saved, shape_of

LEAF = "torch::autograd::AccumulateGrad"

# Layers that hold a batch of indices: their only edge leads to a parameter, yet what comes out is data.
_DATA = frozenset(
    f"{name}Backward0"
    for name in (
        "Embedding EmbeddingBag Index IndexSelect Gather Take MaskedSelect MaskedFill NllLoss NllLoss2D SoftMarginLoss "
        "MultiMarginLoss MultilabelMarginLoss NativeDropout"
    ).split()
)
# Operations of several inputs that are met where only parameters are combined (penalties, low-rank weights).
_COMBINES = frozenset(
    f"{name}Backward0" for name in "Add Sub Rsub Mul Div Mm Bmm Mv Dot Stack Cat Maximum Minimum Addcmul".split()
)
_OFFSETS = frozenset(("AddBackward0", "SubBackward0", "RsubBackward0"))
_PRODUCTS = frozenset(("MulBackward0", "DivBackward0"))

# Between a reduction and the matmul whose entries it compares: linear operations ...
_LINEAR = frozenset(
    f"{name}Backward{i}"
    for i in range(4)
    for name in (
        "ToCopy Clone View UnsafeView ReshapeAlias Squeeze Unsqueeze Alias T Transpose Permute Expand Slice Select "
        "Index MaskedSelect IndexSelect Gather Diagonal MaskedFill Where Stack Cat Sum Mean Add Sub Rsub Neg Mul Div"
    ).split()
)
# ... and those that are not linear in their first input.
_NONLINEAR = frozenset(
    f"{name}Backward{i}"
    for i in range(4)
    for name in (
        "LogSoftmax Softmax Logsumexp NllLoss NllLoss2D MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits SoftMarginLoss Pow Sqrt Exp Log Log1P Abs Clamp ClampMin ClampMax Relu Softplus "
        "LogSigmoid Sigmoid Tanh Amax Max Maximum Minimum Norm LinalgVectorNorm"
    ).split()
)
_SPREADS = frozenset(("VarBackward0", "StdBackward0", "VarMeanBackward0", "StdMeanBackward0"))
_MATMUL_OPERANDS = {"MmBackward0": (0, 1), "AddmmBackward0": (1, 2), "BmmBackward0": (0, 1)}
_ROLES = {
    **dict.fromkeys(_LINEAR, "linear"),
    **dict.fromkeys(_NONLINEAR, "nonlinear"),
    **dict.fromkeys(_SPREADS, "spread"),
    **dict.fromkeys(_MATMUL_OPERANDS, "matmul"),
}


def parameters_only(node: Node, budget: int = 64) -> bool:
    """Whether every leaf below ``node`` is a parameter and no constant tensor with dims takes part.

    Args:
        node: Where to start.
        budget: Nodes to visit before the answer is "no"; a model is never searched to its end.
    """
    stack = [node]
    while stack:
        node = stack.pop()
        name = node.name()
        if name == LEAF:
            if not isinstance(node.variable, Parameter):
                return False
            continue
        budget -= 1
        edges = node.next_functions
        if budget < 0 or name in _DATA or not edges or (len(edges) > 1 and name not in _COMBINES):
            return False
        for child, _ in edges:
            if child is not None:
                stack.append(child)
            elif _constant_has_dims(node, name, edges):
                return False
    return True


def _constant_has_dims(node: Node, name: str, edges: tuple) -> bool:
    """Whether the operand of ``node`` that is not in the graph is more than a number."""
    if name in _PRODUCTS:
        try:
            return saved(node, "self" if edges[0][0] is None else "other").dim() > 0
        except UnreadableLoss:
            return True
    if name in _OFFSETS:
        # The constant itself is not saved, but what it broadcast shows: y - w has the shape of y.
        child, output_nr = edges[0] if edges[1][0] is None else edges[1]
        return shape_of(node) != shape_of(child, output_nr)
    return True


def compares_examples(node: Node | None, nonlinear: bool = False, budget: int = 32) -> bool:
    """Whether the values below a reduction compare examples of the batch with each other.

    Two patterns tell: the product of two activations (the logits of a contrastive loss), looked for no deeper than the
    last matmul, and a nonlinear function of a mean or a spread over dim 0.

    Args:
        node: The node under the reduction.
        nonlinear: Whether the reduction above is itself nonlinear in what is below (cross-entropy).
        budget: Nodes to visit at most.
    """
    stack = [(node, nonlinear)] if node is not None else []
    while stack and budget:
        budget -= 1
        node, nonlinear = stack.pop()
        name = node.name()
        role = _ROLES.get(name)
        if role is None:
            continue
        if role == "matmul":
            if _multiplies_activations(node, name):
                return True
        elif role == "spread" or (nonlinear and name == "MeanBackward1"):
            if _runs_over_batch(node):
                return True
        else:
            edges = node.next_functions
            if role == "nonlinear" or (name in _PRODUCTS and edges[0][0] is not None and edges[1][0] is not None):
                nonlinear = True
            for child, _ in edges:
                if child is not None:
                    stack.append((child, nonlinear))
    return False


def _multiplies_activations(node: Node, name: str) -> bool:
    edges = node.next_functions
    first, second = (edges[i][0] for i in _MATMUL_OPERANDS[name])
    if first is None or second is None:
        return False
    # A batched product of several matrices stays inside its examples; einsum("nd,md->nm") is a batch of one.
    if name == "BmmBackward0" and shape_of(node)[0] != 1:
        return False
    return not parameters_only(second) and not parameters_only(first)


def _runs_over_batch(node: Node) -> bool:
    child, output_nr = node.next_functions[0]
    return 0 in dims_of(node, len(shape_of(child, output_nr)))
