"""Batches of any nesting are cut along their examples and joined again, or it is said why not."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from accum_plugin.equivalence.batches import CannotSplit, batch_size, join_batches, map_tensors, split_batch


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[str]


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: torch.Tensor
    epoch: int = dataclasses.field(default=0)


def _x(rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3)


NESTINGS: dict[str, Any] = {
    "tensor": _x(),
    "dict": {"x": _x(), "y": torch.arange(4), "scale": 0.5, "name": "train", "none": None},
    "default dict": collections.defaultdict(list, x=_x(), y=["a", "b", "c", "d"]),
    "user dict": collections.UserDict(x=_x()),
    "batch encoding": BatchEncoding({"input_ids": torch.arange(20).reshape(4, 5), "labels": torch.arange(4)}),
    "model output": BaseModelOutput(last_hidden_state=_x()),
    "loader's list": [_x(), torch.arange(4)],
    "nested tuple": ((_x(), _x() + 1), {"deep": [_x(), torch.arange(4)]}),
    "namedtuple": Pair(_x(), ["a", "b", "c", "d"]),
    "dataclass": Sample(_x(), torch.arange(4), 7),
    "ragged list": {"ids": [torch.arange(n) for n in (3, 1, 2, 5)], "y": torch.arange(4)},
    "ragged lists of numbers": {"ids": [[1, 2], [3], [4, 5, 6], []], "y": torch.arange(4)},
    "detection": ([torch.zeros(8, n, n) for n in (4, 5, 6, 7)], [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 0, 3)]),
    "scalar tensor": (_x(), torch.tensor(3.0)),
}


def equal(one: Any, other: Any) -> bool:
    """Compare two batches in type and in every value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, collections.abc.Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("batch", NESTINGS.values(), ids=NESTINGS.keys())
def test_a_batch_cut_apart_and_joined_is_the_same_batch(batch: Any) -> None:
    assert batch_size(batch) == 4
    parts = [split_batch(batch, 0, 3), split_batch(batch, 3, 4)]
    assert [batch_size(part) for part in parts[:1]] == [3]
    assert equal(join_batches(parts), batch)


@given(cut=st.integers(1, 6), rows=st.integers(7, 9), kind=st.sampled_from([list, tuple]))
@settings(max_examples=25, deadline=None)
def test_any_cut_of_a_list_or_tuple_joins_to_the_whole(cut: int, rows: int, kind: type) -> None:
    batch = kind([_x(rows), {"y": torch.arange(rows), "words": [str(i) for i in range(rows)]}])
    assert equal(join_batches([split_batch(batch, 0, cut), split_batch(batch, cut, rows)]), batch)


def test_parts_are_views_and_the_batch_is_left_alone() -> None:
    batch = BatchEncoding({"x": _x()})
    part = split_batch(batch, 1, 3)
    assert part["x"].data_ptr() == batch["x"][1].data_ptr()
    assert batch["x"].shape == (4, 3)


def test_parts_that_disagree_are_named() -> None:
    batch = {"x": _x(4), "mask": torch.ones(3, 3)}
    assert batch_size(batch) is None
    with pytest.raises(CannotSplit, match=r"batch\['mask'\] holds 3 examples where the parts before it hold 4"):
        split_batch(batch, 0, 2)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"graph": object()}, "is a object"),
        ((_x(), object()), "is a object"),
        ({"x": _x(), "packed": pack_sequence([torch.ones(3), torch.ones(2)])}, "PackedSequence"),
        ({"x": torch.eye(4).to_sparse()}, "sparse"),
        ({"scale": 1.0, "name": "x"}, "nothing in the batch says"),
        (torch.tensor(1.0), "nothing in the batch says"),
    ],
)
def test_what_cannot_be_cut_is_said(batch: Any, said: str) -> None:
    assert batch_size(batch) is None
    with pytest.raises(CannotSplit, match=said):
        split_batch(batch, 0, 1)


def test_a_list_that_reads_two_ways_is_refused() -> None:
    batch = {"boxes": [torch.zeros(2, 4), torch.zeros(2, 4)], "y": torch.arange(2)}
    with pytest.raises(CannotSplit, match="one per example, or one per input"):
        split_batch(batch, 0, 1)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.zeros(2, 5), torch.zeros(2, 6)], "more than the number of rows"),
        ([{"x": _x(2)}, {"y": _x(2)}], "does not have the same parts"),
        ([{"x": _x(2), "count": 3}, {"x": _x(2), "count": 4}], "differs between batches: 3 or 4"),
        ([_x(2), [_x(2)]], "same type"),
        ([], "no batches"),
    ],
)
def test_what_cannot_be_joined_is_said(batches: list[Any], said: str) -> None:
    with pytest.raises(CannotSplit, match=said):
        join_batches(batches)


def test_map_tensors_reaches_every_tensor_and_keeps_the_rest() -> None:
    marker = object()
    batch = {"x": (_x(), [Sample(_x(), _x())]), "packed": pack_sequence([torch.ones(3)]), "other": marker}
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert torch.equal(doubled["x"][1][0].label, _x() * 2)
    assert torch.equal(doubled["packed"].data, torch.full((3,), 2.0))
    assert doubled["other"] is marker
    assert torch.equal(batch["x"][0], _x())
