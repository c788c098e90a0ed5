"""Data for the rows: the numbers 1, 2, 3, ..., dealt over windows, ranks and microbatches.

With one weight ``w`` and the loss ``w * x`` of an example ``x``, the gradient *is* the weighted mean of the ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corpus.case import Setting

EXAMPLES = 5  # in a microbatch: none of the numbers of ranks and accumulation steps in the table


def deal(at: Setting, counts: Sequence[Sequence[Sequence[int]]]) -> tuple[list[Tensor], list[list[float]]]:
    """Deal numbers out; return this rank's microbatches and each window's mean.

    Args:
        at: Where the loop runs.
        counts: ``counts[window][rank][k]``, examples in the rank's ``k``-th microbatch of the window.
    """
    mine: list[Tensor] = []
    means: list[list[float]] = []
    first = 1
    for window in counts:
        start = first
        for rank, sizes in enumerate(window):
            for size in sizes:
                if rank == at.rank:
                    mine.append(torch.arange(first, first + size, dtype=torch.float64))
                first += size
        means.append([(start + first - 1) / 2])
    return mine, means


def even(at: Setting, *lengths: int, size: int = EXAMPLES) -> tuple[list[Tensor], list[list[float]]]:
    """Deal windows of ``lengths`` microbatches per rank, ``size`` examples each; one window of ``K`` by default."""
    return deal(at, [[[size] * length] * at.n for length in lengths or (at.K,)])
