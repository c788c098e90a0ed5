"""Batches of any nesting: how many examples they hold, cutting them along the examples, and joining them.

Tensors are cut along dimension 0. A list is either *structure* (``[inputs, targets]``) or *data*, one element per
example (``["a", "b"]``, tensors of different lengths); which of the two is decided from the sizes around it.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: Values that belong to the whole batch and are kept as they are.
SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)


class CannotSplit(ValueError):
    """A batch that cannot be cut along its examples, or batches that cannot be joined; the message says why."""


def batch_size(batch: Any) -> int | None:
    """Return the number of examples in ``batch``, or ``None`` where its parts do not agree on one.

    Example:
        >>> batch_size({"ids": torch.zeros(4, 7), "names": ["a", "b", "c", "d"]})
        4
    """
    try:
        return _examples(batch)
    except CannotSplit:
        return None


def split_batch(batch: Any, start: int, stop: int) -> Any:
    """Return examples ``start`` to ``stop`` of ``batch``, in containers of the same types; tensors are views.

    Raises:
        CannotSplit: If the parts disagree on the number of examples or one of them cannot be cut.

    Example:
        >>> split_batch((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
        (tensor([1, 2]), ['b', 'c'])
    """
    num_examples = _examples(batch)
    return _cut(batch, range(num_examples)[start:stop], num_examples, "batch")


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenate batches along their examples; what :func:`split_batch` cut apart comes back as it was.

    Raises:
        CannotSplit: If the batches differ in structure, in a value that is not per example, or in the size of a
            dimension other than the first (sequences padded to different lengths).
    """
    if not batches:
        raise CannotSplit("there are no batches to join")
    return _join(list(batches), [_examples(batch) for batch in batches], "batch")


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``batch`` with ``function`` applied to every tensor, in new containers of the same types.

    What is neither a tensor nor a container is kept by reference.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, PackedSequence):
        return batch._replace(data=function(batch.data))
    parts = _children(batch)
    if parts is None:
        return batch
    return _rebuild(batch, {key: map_tensors(part, function) for key, part in parts.items()})


def _children(node: Any) -> dict[Any, Any] | None:
    """Return a container's parts by key, field or position; ``None`` for what is not a container."""
    if isinstance(node, (SCALARS, Tensor, PackedSequence)):
        return None
    if isinstance(node, Mapping):
        return dict(node.items())
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def _rebuild(node: Any, parts: dict[Any, Any]) -> Any:
    """Build a container like ``node`` with other parts."""
    if isinstance(node, MutableMapping):
        new = copy.copy(node)  # keeps a default factory, and what a BatchEncoding knows beside its data
        for key, part in parts.items():
            new[key] = part
        return new
    if isinstance(node, Mapping):
        return type(node)(parts)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*parts.values())
    if isinstance(node, (list, tuple)):
        return type(node)(parts.values())
    new = copy.copy(node)
    for name, part in parts.items():
        object.__setattr__(new, name, part)  # frozen dataclasses too
    return new


def _is_list(node: Any) -> bool:
    """Whether ``node`` may hold one element per example: an unnamed list or tuple of things of one kind."""
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields") or isinstance(node, torch.Size):
        return False
    return len({_kind(element) for element in node}) <= 1


def _kind(element: Any) -> Any:
    if isinstance(element, Tensor):
        return (element.dtype, element.dim())
    return "scalar" if isinstance(element, SCALARS) else type(element)


def _is_per_batch(node: Any) -> bool:
    return isinstance(node, SCALARS) or (isinstance(node, Tensor) and node.dim() == 0)


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, Tensor):
        return True
    return any(_holds_tensor(part) for part in (_children(node) or {}).values())


def _sizes(node: Any, where: str) -> dict[int, None] | None:
    """Return the numbers of examples ``node`` can be read as, best first; ``None`` where it does not say.

    Raises:
        CannotSplit: If its parts disagree, or it is of a kind that cannot be cut.
    """
    if _is_per_batch(node):
        return None
    if isinstance(node, Tensor):
        if node.layout is not torch.strided:
            raise CannotSplit(f"{where} is a tensor of layout {node.layout}, which cannot be cut along its examples")
        return {node.size(0): None}
    parts = _children(node)
    if parts is None:
        raise CannotSplit(f"{where} is a {type(node).__name__}, which cannot be cut along its examples")
    if not _is_list(node):
        return _agreed(parts, where)
    if not parts:
        return None
    if not _holds_tensor(node):
        return {len(parts): None}
    try:
        inner = _agreed(parts, where)
    except CannotSplit:
        inner = {}
    return {**(inner or {}), len(parts): None}


def _agreed(parts: dict[Any, Any], where: str) -> dict[int, None] | None:
    """Return the numbers of examples that all ``parts`` can be read as."""
    agreed: dict[int, None] | None = None
    for key, part in parts.items():
        sizes = _sizes(part, f"{where}[{key!r}]")
        if sizes is None:
            continue
        common = sizes if agreed is None else {size: None for size in agreed if size in sizes}
        if not common:
            raise CannotSplit(
                f"{where}[{key!r}] holds {_listing(sizes)} examples where the parts before it hold {_listing(agreed)}"
            )
        agreed = common
    return agreed


def _examples(batch: Any) -> int:
    sizes = _sizes(batch, "batch")
    if not sizes:
        raise CannotSplit("nothing in the batch says how many examples it holds")
    return next(iter(sizes))


def _is_data(node: Any, num_examples: int, where: str) -> bool | None:
    """Whether a list holds one element per example (``None``: both readings fit)."""
    if not _is_list(node) or len(node) != num_examples:
        return False
    if not _holds_tensor(node):
        return True
    try:
        inner = _agreed(_children(node) or {}, where)
    except CannotSplit:
        return True
    if inner is None or num_examples not in inner:
        return True
    # Two lists of two rows each: what a loader returns at the top, but below it both readings are common.
    return False if where == "batch" or isinstance(node, tuple) else None


def _ambiguous(where: str, num_examples: int) -> CannotSplit:
    return CannotSplit(
        f"{where} is a list of {num_examples} tensors of {num_examples} rows: one per example, or one per input?"
    )


def _cut(node: Any, rows: range, num_examples: int, where: str) -> Any:
    if _is_per_batch(node):
        return node
    if isinstance(node, Tensor):
        return node[rows.start : rows.stop]
    is_data = _is_data(node, num_examples, where)
    if is_data is None:
        raise _ambiguous(where, num_examples)
    if is_data:
        return type(node)(node[rows.start : rows.stop])
    parts = _children(node) or {}
    return _rebuild(node, {key: _cut(part, rows, num_examples, f"{where}[{key!r}]") for key, part in parts.items()})


def _join(nodes: list[Any], sizes: list[int], where: str) -> Any:
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes):
        raise CannotSplit(f"{where} is not of the same type in every batch")
    if _is_per_batch(first):
        return _same_value(nodes, where)
    if isinstance(first, Tensor):
        return _join_tensors(nodes, where)
    readings = {_is_data(node, size, where) for node, size in zip(nodes, sizes)} - {None}
    if len(readings) != 1:
        raise _ambiguous(where, sizes[0])
    if readings.pop():
        return type(first)(element for node in nodes for element in node)
    parts = [_children(node) or {} for node in nodes]
    if any(list(other) != list(parts[0]) for other in parts):
        raise CannotSplit(f"{where} does not have the same parts in every batch")
    return _rebuild(first, {key: _join([p[key] for p in parts], sizes, f"{where}[{key!r}]") for key in parts[0]})


def _same_value(nodes: list[Any], where: str) -> Any:
    if any(bool(node != nodes[0]) for node in nodes):
        raise CannotSplit(f"{where} is one value for a whole batch and differs between batches: {_listing(nodes)}")
    return nodes[0]


def _join_tensors(tensors: list[Tensor], where: str) -> Tensor:
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        shapes = _listing(tuple(tensor.shape) for tensor in tensors)
        raise CannotSplit(f"{where} differs in more than the number of rows: {shapes}")
    return torch.cat(tensors)


def _listing(values: Any) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values or ()))
