"""What a probe must put back: random state, training flags, buffers, gradients, and counters kept in attributes."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_CONTAINERS = (list, dict, set, deque)
#: Tables of ``nn.Module`` that are saved by their own means or must not be emptied and refilled.
_TABLES = ("_parameters", "_modules", "_buffers")


@contextlib.contextmanager
def undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back, on leaving, everything that running ``modules`` changes.

    That is the random state (Python, NumPy, PyTorch on every device), every module's training flag, buffers, plain
    attributes (numbers, tensors, the elements of lists and dictionaries: a lazily kept counter, a metric's state),
    and each parameter's ``.grad`` and ``requires_grad``. Inside, ``.grad`` is ``None``.
    """
    every = list(dict.fromkeys(part for module in modules for part in module.modules()))
    restore = [_save_random_state(), *(_save_module(module) for module in every), _save_gradients(every)]
    try:
        yield
    finally:
        for undo in restore:
            undo()


def random_state() -> list[Any]:
    """Return PyTorch's random state on the CPU and on every accelerator that is in use, for comparing."""
    return [torch.get_rng_state(), *(module.get_rng_state(index) for module, index in _accelerators())]


def same_random_state(one: list[Any], other: list[Any]) -> bool:
    """Whether no random number was drawn between two calls of :func:`random_state`."""
    return all(torch.equal(a, b) for a, b in zip(one, other))


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators, on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let ``torch.distributed`` calls on the default process group see a world of this one process.

    A loss that divides by the world size or adds counts up over ranks then does what it would do on one process.
    Groups that are named explicitly are left alone. Needs no other rank: ranks may enter at different times.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    world = dist.group.WORLD
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.group.WORLD = alone
    try:
        yield
    finally:
        dist.group.WORLD = world
        dist.destroy_process_group(alone)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a ``DistributedDataParallel`` wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _save_module(module: nn.Module) -> Callable[[], None]:
    table = module.__dict__
    if isinstance(module, DistributedDataParallel):  # its attributes mirror a reducer that cannot be turned back
        training, broadcast = module.training, module.broadcast_buffers
        return lambda: table.update(training=training, broadcast_buffers=broadcast)
    saved = {name: (value, _saved_value(value)) for name, value in table.items() if name not in _TABLES}
    buffers = {name: (buffer, _saved_value(buffer)) for name, buffer in module._buffers.items()}

    def undo() -> None:
        for name in [name for name in table if name not in saved and name not in _TABLES]:
            del table[name]
        for name, (value, copied) in saved.items():
            _restore_value(value, copied)
            table[name] = value
        for name in [name for name in module._buffers if name not in buffers]:
            del module._buffers[name]
        for name, (buffer, copied) in buffers.items():
            _restore_value(buffer, copied)
            module._buffers[name] = buffer

    return undo


def _saved_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _restore_value(value: Any, saved: Any) -> None:
    """Bring a tensor or container back to what it held, in the same object."""
    if saved is None:
        return
    if isinstance(value, Tensor):
        if not _same_tensor(value, saved):  # an untouched tensor keeps its version counter
            value.detach().copy_(saved)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(saved)
    else:
        value.clear()
        value.extend(saved)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    same = one == other
    return bool((same | ((one != one) & (other != other))).all())  # a NaN is equal to itself here


def _save_gradients(modules: list[nn.Module]) -> Callable[[], None]:
    parameters = list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))
    saved = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    def undo() -> None:
        for parameter, grad, requires_grad in saved:
            parameter.grad = grad
            parameter.requires_grad_(requires_grad)

    return undo


def _save_random_state() -> Callable[[], None]:
    python, cpu = random.getstate(), torch.get_rng_state()
    devices = [(module, index, module.get_rng_state(index)) for module, index in _accelerators()]
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def undo() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        for module, index, state in devices:
            module.set_rng_state(state, index)
        if numpy:
            numpy.random.set_state(numpy_state)

    return undo


def _accelerators() -> list[tuple[Any, int]]:
    """Return the module and index of each accelerator device that is in use (asking must not start one)."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return []
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [(module, index) for index in range(torch.accelerator.device_count())]
