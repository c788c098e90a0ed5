"""Nodes that only pass a value on: casts, views, and the identities that wrappers put around a loss."""

from __future__ import annotations

from torch.autograd.graph import Node

PASSES = frozenset(
    "ToCopyBackward0 CloneBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 AliasBackward0 "
    "SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 UnsqueezeBackward0 NanToNumBackward0 "
    "TBackward0 PermuteBackward0 TransposeBackward0 TransposeBackward1".split()
)
"""Nodes that keep every element once, on the scalar path and below a reduction."""

# Autograd functions of wrappers whose i-th output is their i-th input.
_IDENTITIES = frozenset(
    (
        "_DDPSinkBackward",  # DistributedDataParallel, static graph or unused parameters
        "RegisterPostBackwardFunctionBackward",  # fully_shard
        "BackwardHookFunctionBackward",  # Module.register_full_backward_hook
        "PreBackwardFunctionForModuleBackward",  # DeepSpeed ZeRO 3
        "PostBackwardFunctionModuleBackward",
    )
)
_SINGLE = PASSES | {"ExpandBackward0"}


def peel(node: Node, output_nr: int) -> tuple[Node, int]:
    """Step over nodes that only pass a one-element tensor on."""
    while True:
        name = node.name()
        if name in _SINGLE:
            node, output_nr = node.next_functions[0]
        elif name in _IDENTITIES:
            node, output_nr = node.next_functions[output_nr]
        else:
            return node, output_nr
