"""ACC402: examples that a sampler repeats so that all ranks get equally many."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.rules.data import DuplicatedSamples


@dataclasses.dataclass(frozen=True)
class Padding:
    """Repeats at the end of every epoch, over all ranks.

    Args:
        repeats: Examples that are loaded once more.
        examples: Distinct examples.
        who: What repeats them, in words.
    """

    repeats: int
    examples: int
    who: str


def sampler_padding(sampler: Any) -> Padding | None:
    """Repeats of PyTorch's ``DistributedSampler`` (a subclass may do otherwise: ``None``).

    Example:
        >>> sampler_padding(DistributedSampler(range(5), num_replicas=2, rank=0)).repeats
        1
    """
    if type(sampler) is not DistributedSampler or sampler.drop_last:
        return None
    size = len(sampler.dataset)
    repeats = sampler.total_size - size
    return Padding(repeats, size, "DistributedSampler") if repeats > 0 else None


def even_padding(num_examples: int, total_batch_size: int) -> Padding | None:
    """Repeats where all ranks get equally many full batches.

    Args:
        num_examples: Examples in the data set.
        total_batch_size: Examples in one batch of every rank together.

    Example:
        >>> even_padding(5, 4).repeats
        3
    """
    repeats = -num_examples % total_batch_size
    return Padding(repeats, num_examples, "even_batches=True") if repeats else None


class Repeats(Neighbor):
    """Says once what the sampler repeats."""

    _said = False

    def before_backward(self) -> None:
        """Ask the framework at the first backward pass, when the loader is certainly there."""
        if self._said:
            return
        self._said = True
        padding = self.host.padding()
        if padding is not None:
            self.report(duplicated(padding))


def duplicated(padding: Padding) -> Finding:
    """Word the repeats of one epoch."""
    total = padding.examples + padding.repeats
    seen = (
        f"{padding.who} makes {total} examples of {padding.examples} so that all ranks get equally many: "
        f"the last batches of every epoch hold {padding.repeats} repeats."
    )
    return DuplicatedSamples.finding(seen, certainty="info", evidence="configuration")
