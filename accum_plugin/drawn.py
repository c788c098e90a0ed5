"""Which of the loader's batches is at hand: loops draw several before they run the first."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

REMEMBERED = 1024  # batches that were drawn and not seen again; a window may be prefetched as a whole


@dataclasses.dataclass(slots=True)
class _Batch:
    tensors: list[weakref.ref[Tensor]]
    num_examples: int | None
    whole: Any


class Drawn:
    """Remembers the batches that a loader has yielded until the model is called with one of their tensors.

    Batches are remembered by weak references, so that one that the loop has dropped is not kept alive.

    Args:
        keep: Whether to remember the batches themselves (a ``units`` function wants to see them).
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._batches: collections.deque[_Batch] = collections.deque(maxlen=REMEMBERED)

    def add(self, batch: Any, num_examples: int | None) -> None:
        """The loader yields ``batch``."""
        while self._batches and not any(reference() is not None for reference in self._batches[0].tensors):
            self._batches.popleft()
        tensors = [weakref.ref(tensor) for tensor in tensors_in(batch)]
        self._batches.append(_Batch(tensors, num_examples, batch if self._keep else None))

    def find(self, *inputs: Any) -> tuple[Any, int | None] | None:
        """Return the batch that the model is called with, and its number of examples; older ones are forgotten.

        Args:
            inputs: What the model is called with.

        Returns:
            ``None`` where no batch holds any of the tensors, as after padding or masking by the loop.
        """
        given = {id(tensor) for part in inputs for tensor in tensors_in(part)}
        for index, batch in enumerate(self._batches):
            if any(id(reference()) in given for reference in batch.tensors):
                for _ in range(index):
                    self._batches.popleft()
                return batch.whole, batch.num_examples
        return None


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors in a batch and in its containers, one level deep.

    Example:
        >>> import torch
        >>> len(tensors_in({"x": torch.zeros(2), "pair": (torch.zeros(2), torch.zeros(2)), "name": "a"}))
        3
    """
    found = []
    for part in _parts(batch):
        found += [part] if isinstance(part, Tensor) else [inner for inner in _parts(part) if isinstance(inner, Tensor)]
    return found


def _parts(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, (list, tuple)):
        return list(container)
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, field.name) for field in dataclasses.fields(container)]
    return [container] if isinstance(container, Tensor) else []
