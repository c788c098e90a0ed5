"""How data-parallel ranks are combined: the number of ranks, what the wrapper does, and the plugin's own sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.sharding import add_up, divide_factors, sharded_units

#: Communication hooks known to divide by the number of ranks before or after they add up.
AVERAGING_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class Reduction:
    """The data-parallel ranks of a run and how its wrapper combines their gradients.

    Args:
        models: The models that are trained, wrapped (``DistributedDataParallel``) or bare.
        num_ranks: Ranks that see different examples, where the framework knows better than the world size (tensor-
            or context-parallel ranks share their examples); ``None`` takes the wrapper's process group.
        seen: Called with ``(num_bytes,)`` at each collective of the plugin's own, for counting in tests.
    """

    def __init__(
        self, models: Sequence[nn.Module], *, num_ranks: int | None = None, seen: Callable[[int], None] | None = None
    ) -> None:
        self.wrappers = [model for model in models if isinstance(model, DistributedDataParallel)]
        self._units = sharded_units(models)
        self.sharded = bool(self._units)
        self.divide_factors: set[float | None] = set()  # of sharded units; more than one is a mistake
        self._group = self.wrappers[0].process_group if self.wrappers else None
        world = dist.get_world_size(self._group) if _initialized() else 1
        self.num_ranks = world if num_ranks is None else num_ranks
        self._shared = world / self.num_ranks  # ranks that hold the same examples, each of which adds them once more
        self._seen = seen
        self._host_group: Any = None
        self._world = world
        self.rewritten = False

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Take up wrappers that were prepared later."""
        known = {id(wrapper) for wrapper in self.wrappers}
        self.wrappers += [m for m in models if isinstance(m, DistributedDataParallel) and id(m) not in known]

    @property
    def distributed(self) -> bool:
        """Whether there is more than one rank to exchange numbers with."""
        return self._world > 1

    @property
    def expected(self) -> float | None:
        """The factor the wrapper is documented to combine ranks with: ``1/n``; ``None`` where a hook decides.

        With a divide factor ``d``, FSDP2 combines them with ``1/d``.
        """
        if self.num_ranks == 1 and not self.sharded:
            return 1.0
        if self.sharded:
            (factor,) = self.divide_factors if len(self.divide_factors) == 1 else (None,)
            return 1.0 / (factor or self.num_ranks)
        if not self.wrappers or self.custom_hook:
            return None
        return 1.0 / self.num_ranks

    @property
    def custom_hook(self) -> bool:
        """Whether a communication hook that is not known to average decides how ranks are combined."""
        hooks = [hook for wrapper in self.wrappers for hook, _ in getattr(wrapper, "_comm_hooks", ())]
        return any(getattr(hook, "__name__", "") not in AVERAGING_HOOKS for hook in hooks)

    @property
    def compresses(self) -> bool:
        """Whether a communication hook may send gradients in half precision."""
        return any(getattr(wrapper, "_comm_hooks", ()) for wrapper in self.wrappers) and not self.rewritten

    @property
    def joined(self) -> bool:
        """Whether uneven inputs are being joined: ranks may have left, so no collective of ours is safe."""
        return any(getattr(getattr(wrapper, "_join_config", None), "enable", False) for wrapper in self.wrappers)

    def synchronizes(self) -> bool:
        """Whether the next backward pass will make the wrapper combine gradients, on every rank."""
        return bool(self.wrappers) and all(wrapper.require_backward_grad_sync for wrapper in self.wrappers)

    def in_step(self) -> bool:
        """Whether every rank runs the coming backward pass: a point at which ranks may tell each other something.

        Sharded parameters are gathered in every backward pass, whether gradients are combined in it or not.
        """
        return self.sharded or self.synchronizes()

    def describe(self) -> str:
        """Say in plain words how ranks are combined."""
        if self.num_ranks == 1:
            return "one data-parallel rank, nothing to combine"
        if self.sharded:
            how = (
                "averages" if self.expected == 1.0 / self.num_ranks else f"multiplies their sum by {self.expected:.4g}"
            )
            return f"{self.num_ranks} ranks, FSDP {how} (as configured: sharding hides local gradients)"
        if not self.wrappers:
            return f"{self.num_ranks} ranks, no DistributedDataParallel wrapper: measured at the step"
        if self.custom_hook:
            return f"{self.num_ranks} ranks, DDP with a communication hook: measured at the step"
        return f"{self.num_ranks} ranks, DDP averages their gradients"

    def prepare(self) -> None:
        """Read what the wrapper divides by, and find a group that can add up numbers on the host.

        Every rank must call this.
        """
        self.divide_factors = divide_factors(self._units)
        if self.distributed and "cpu" not in {str(kind) for kind in _device_kinds(self._group)}:
            ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            self._host_group = dist.new_group(ranks, backend="gloo")

    def sum(self, values: list[float]) -> list[float]:
        """Add up float64 numbers over the data-parallel ranks, on the host."""
        return self._reduce(values, dist.ReduceOp.SUM, 1.0 / self._shared)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each number over the data-parallel ranks, on the host."""
        return self._reduce(values, dist.ReduceOp.MAX, 1.0)

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Add up a float64 tensor over the data-parallel ranks where it lives, without a synchronization."""
        if self.distributed:
            dist.all_reduce(values, group=self._group)
            self._count(values)
            values /= self._shared
        return values

    def _reduce(self, values: list[float], op: Any, scale: float) -> list[float]:
        if not self.distributed:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=op, group=self._host_group or self._group)
        self._count(numbers)
        return [value * scale for value in numbers.tolist()]

    def _count(self, numbers: Tensor) -> None:
        if self._seen is not None:
            self._seen(numbers.numel() * numbers.element_size())

    def rewrite_to_sum(self) -> bool:
        """Make DDP or FSDP2 add gradients up instead of averaging them; return whether it could be done.

        DDP takes one communication hook in its life: a wrapper that has one already is left alone.
        """
        if self._units and all(hasattr(unit, "set_gradient_divide_factor") for unit in self._units):
            add_up(self._units)
            self.divide_factors, self.rewritten = {1.0}, True
            return True
        if not self.wrappers or any(getattr(wrapper, "_comm_hooks", ()) for wrapper in self.wrappers):
            return False
        for wrapper in self.wrappers:
            wrapper.register_comm_hook(wrapper.process_group, sum_hook)
        self.rewritten = True
        return True


def sum_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """Communication hook for DDP that adds gradients up and does not divide."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def mesh_ranks(mesh: Any) -> int | None:
    """Number of ranks along a device mesh's data-parallel axes (``dp*``, ``data*``, ``replicate``, ``shard``)."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    sizes = [mesh[name].size() for name in names if name.startswith(("dp", "data", "replicate", "shard"))]
    return math.prod(sizes) if sizes else None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device_kinds(group: Any) -> Iterable[Any]:
    return getattr(group or dist.group.WORLD, "_device_types", ())
