"""Running a model under controlled conditions: random layers off, batch statistics frozen, rounding observed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Functions that drop at random: the position and keyword of the argument that decides, and its harmless value.
_RANDOM_FUNCTIONS: dict[Callable[..., Any], tuple[int, str, Any]] = {
    **{
        function: (1, "p", 0.0)
        for function in (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.dropout_,
            torch.feature_dropout,
            torch.alpha_dropout,
        )
    },
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
}
#: Parts of the class names of layers that act at random in training mode and hold no parameters.
_RANDOM_LAYERS = ("drop", "stochasticdepth", "gaussiannoise", "rrelu")


class _NoDropout(TorchFunctionMode):
    """Switches dropout off in functional calls, in attention, and wherever a module passes on its own probability."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _RANDOM_FUNCTIONS:
            position, keyword, harmless = _RANDOM_FUNCTIONS[func]
            if len(args) > position:
                args = (*args[:position], harmless, *args[position + 1 :])
            else:
                kwargs[keyword] = harmless
        return func(*args, **kwargs)


@contextlib.contextmanager
def random_layers_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch dropout and kin off; use inside ``undisturbed``, which puts flags back."""
    for module in _every(modules):
        if isinstance(module, nn.RNNBase):  # keeps its training flag: cuDNN's backward pass insists on it
            module.dropout = 0.0
        elif is_random_layer(module):
            module.training = False
    with _NoDropout():
        yield


def is_random_layer(module: nn.Module) -> bool:
    """Whether ``module`` is a layer that acts at random in training mode (dropout, stochastic depth, ...)."""
    name = type(module).__name__.lower().replace("_", "")
    return any(part in name for part in _RANDOM_LAYERS) and not module._parameters and not module._modules


def batch_statistics_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers that normalize by the statistics of the batch they see (BatchNorm and kin, training)."""
    return [m for m in _every(modules) if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]


def freeze_batch_statistics(modules: Iterable[nn.Module]) -> None:
    """Put BatchNorm layers in evaluation mode; ``undisturbed`` puts them back."""
    for module in batch_statistics_layers(modules):
        module.training = False


@contextlib.contextmanager
def open_compiled() -> Iterator[None]:
    """Run compiled functions and modules eagerly, for one microbatch.

    A compiled loss is one opaque autograd node; run eagerly inside this context its graph can be read, and nothing is
    compiled anew for it.

    Example:
        >>> compiled = torch.compile(torch.nn.functional.mse_loss, backend="aot_eager")
        >>> with open_compiled():
        ...     loss = compiled(torch.ones(3, requires_grad=True), torch.zeros(3))
        >>> type(loss.grad_fn).__name__
        'MseLossBackward0'
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Rounding(TorchDispatchMode):
    """Notes the coarsest floating-point type that any operation returned, autocast's included."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        self.dtypes.update(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point)
        return result

    def epsilon(self, modules: Iterable[nn.Module] = ()) -> float:
        """Return the rounding unit of the coarsest type seen; TF32's where the device may use it for float32."""
        seen = max((torch.finfo(dtype).eps for dtype in self.dtypes), default=torch.finfo(torch.float32).eps)
        return max(seen, 2.0**-10) if seen >= torch.finfo(torch.float32).eps and _uses_tf32(modules) else seen


def _uses_tf32(modules: Iterable[nn.Module]) -> bool:
    every = list(_every(modules))
    if not any(p.device.type == "cuda" for module in every for p in module._parameters.values() if p is not None):
        return False
    if torch.get_float32_matmul_precision() != "highest":
        return True
    return torch.backends.cudnn.allow_tf32 and any(isinstance(module, (_ConvNd, nn.RNNBase)) for module in every)


def _every(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()
