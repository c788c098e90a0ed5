"""Every rank's microbatches on every rank, and stages that all ranks pass, whatever happened to one of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.equivalence.batches import CannotSplit, batch_size, map_tensors, split_batch
from accum_plugin.equivalence.reference import CannotCheck


class Ranks:
    """The data-parallel ranks, which must come together at each stage, whatever happened to one of them.

    Args:
        model: The model, wrapped or bare.
        group: Its process group; ``None`` takes the wrapper's group, or the default one.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        self._group = group
        active = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if active else 1
        self.rank = dist.get_rank(group) if active else 0
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank and return all results, in rank order.

        Raises:
            CannotCheck: On every rank, if ``work`` raised on one of them.
        """
        result, reason = self._attempt(work)
        outcomes: list[Any] = [(result, reason)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, reason), group=self._group)
        if reasons := [reason for _, reason in outcomes if reason]:
            raise CannotCheck(reasons[0])
        return [result for result, _ in outcomes]

    def each(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on every rank and return this rank's own result.

        Raises:
            CannotCheck: On every rank, if ``work`` raised on one of them.
        """
        result, reason = self._attempt(work)

        def fail() -> None:
            if reason:
                raise CannotCheck(reason)

        self.together(fail)
        return result

    def _attempt(self, work: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return work(), ""
        except (CannotCheck, CannotSplit) as error:
            return None, str(error)
        except Exception as error:  # the user's own code, and other ranks are waiting
            return None, f"rank {self.rank} failed with {error!r}"


def gather(microbatches: Sequence[Any], ranks: Ranks) -> list[list[Any]]:
    """Return the microbatches of every rank, in rank order, on this process's device.

    Raises:
        CannotCheck: On every rank, if a batch of one of them could not be sent.
    """
    if ranks.size == 1:
        return [list(microbatches)]
    return [_unpacked(blob, ranks) for blob in ranks.together(lambda: _packed(microbatches))]


def _packed(microbatches: Sequence[Any]) -> bytes:
    """Return this rank's microbatches as bytes (clones: a view would take its whole storage along)."""
    buffer = io.BytesIO()
    torch.save([map_tensors(batch, torch.clone) for batch in microbatches], buffer)
    return buffer.getvalue()


def _unpacked(blob: bytes, ranks: Ranks) -> list[Any]:
    """Return another rank's microbatches; what was on its accelerator comes to ours, the rest stays on the host."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=ranks.device)

    # These bytes come from the ranks of this very run, which all_gather_object would unpickle just the same.
    return torch.load(io.BytesIO(blob), map_location=place, weights_only=False)


def counts(parts: list[list[Any]]) -> dict[str, int]:
    """Return the ``examples`` of a window and the most ``microbatches`` that a rank has."""
    sizes = [batch_size(batch) or 0 for rank in parts for batch in rank]
    return {"examples": sum(sizes), "microbatches": max(len(rank) for rank in parts)}


def subset(parts: list[list[Any]], limit: int | None) -> tuple[list[list[Any]], bool]:
    """Cut every microbatch down by the same ratio, so that about ``limit`` examples are left.

    Returns:
        The microbatches, and whether anything was cut off.

    Raises:
        CannotCheck: If a microbatch cannot be cut.
    """
    total = counts(parts)["examples"]
    if limit is None or total <= limit:
        return parts, False
    try:
        return [[_cut(batch, limit / total) for batch in rank] for rank in parts], True
    except CannotSplit as error:
        raise CannotCheck(f"no subset could be taken: {error}") from error


def _cut(batch: Any, share: float) -> Any:
    size = batch_size(batch) or 0
    return split_batch(batch, 0, max(1, int(size * share))) if size else batch
