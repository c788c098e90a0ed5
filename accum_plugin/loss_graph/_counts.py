"""What a reduction counts: masks, weights and shapes turned into candidate numbers of units."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from accum_plugin.loss_graph._values import Number, Scale, number, saved

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclasses.dataclass(slots=True)
class Inner:
    """What a scan below one reduction has met.

    Args:
        sizes: Shape of the tensor that the innermost sum (or mean over dim 0) met so far reduces.
        wants_masks: Whether masks matter (a sum counts what a mask lets through; a mean divides by all).
        scales: One-element constants, outermost first.
        masks: Boolean masks and weight tensors, each with the number of elements it is broadcast to.
        counts: Further candidate counts, best first.
        shapes: Shapes of the tensors that the sums above the innermost one reduce.
        batch_count: What a mean over dim 0 divides by, where one was met.
        direct: Whether no weight tensor was met.
        squared: Whether what is reduced is a squared error.
    """

    sizes: tuple[int, ...]
    wants_masks: bool
    scales: list[Scale] = dataclasses.field(default_factory=list)
    masks: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)
    counts: list[Number] = dataclasses.field(default_factory=list)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    batch_count: Number | None = None
    direct: bool = True
    squared: bool = False

    def candidates(self) -> tuple[Number, ...]:
        """Return the candidate counts of a sum: masks and weights, elements, products of leading dims."""
        found: list[Number] = []
        for mask, numel in self._combined():
            count = mask_count(mask, numel)
            if count is not None:
                found.append(count)
        found += self.counts
        found.append(math.prod(self.sizes))
        for sizes in (self.sizes, *self.shapes):
            found += leading(sizes)
        return distinct(found)

    def add_mask(self, mask: Tensor) -> None:
        """Note a mask that multiplies the tensor reduced by the innermost sum."""
        self.masks.append((mask, math.prod(self.sizes)))

    def _combined(self) -> list[tuple[Tensor, int]]:
        """Return the masks, preceded by their product where there are several of one size."""
        masks = self.masks
        if len(masks) < 2 or any(mask.numel() != masks[0][0].numel() for mask, _ in masks):
            return masks
        product = masks[0][0].reshape(-1)
        for mask, _ in masks[1:]:
            product = product * mask.reshape(-1)
        return [(product, masks[0][1]), *masks]


def leading(sizes: tuple[int, ...]) -> list[int]:
    """Return the products of the leading dims: rows first, all elements last."""
    return list(itertools.accumulate(sizes, operator.mul))


def distinct(counts: list[Number]) -> tuple[Number, ...]:
    """Return ``counts`` in order without repeated host numbers."""
    # A tensor equals no other key (its hash is its identity), so nothing on a device is compared.
    return tuple(dict.fromkeys(counts))


def mask_count(mask: Tensor, numel: int) -> Number | None:
    """Return how many of ``numel`` elements a mask lets through, or the sum of the weights.

    Args:
        mask: A mask or weight tensor that broadcasts to ``numel`` elements.
        numel: Elements of the tensor that it multiplies, after broadcasting.

    Returns:
        The count; ``None`` where a weight is negative, since such weights (advantages) count nothing. On a device
        the sign cannot be looked at without waiting for it, so there ``numel`` takes the place of ``None``.
    """
    if mask.numel() == 0:
        return 0
    dtype = mask.dtype
    total = mask.count_nonzero() if dtype is torch.bool else mask.sum(dtype=_WIDER.get(dtype))
    repeats = numel // mask.numel()
    if repeats > 1:
        total = total * repeats
    if dtype is torch.bool:
        return number(total)
    lowest = mask.amin()
    if mask.is_cpu:
        return number(total) if lowest.tolist() >= 0 else None
    return torch.where(lowest < 0, numel, total)


def valid_targets(nll: Node) -> Tensor:
    """Return which targets of a negative log-likelihood node are not ``ignore_index``."""
    ignored = nll._saved_ignore_index
    return saved(nll, "target") != (ignored if ignored < 2**63 else ignored - 2**64)
