"""Static buffers, buckets and the tensors of a state: what graphs are fed."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from draftcore_graphs.buckets import doubling, largest_first, multiples, pad_to
from draftcore_graphs.buffers import Slot, StaticBuffers
from draftcore_graphs.states import fault, narrow, settle, tensors

from draftcore.contracts.runner import ShapeKey

LARGE, SMALL = ShapeKey(4, 6), ShapeKey(2, 3)


@pytest.fixture
def buffers() -> StaticBuffers:
    slots = (
        Slot("tokens", lambda key: (key.rows, key.length), torch.long, "tokens"),
        Slot("lengths", lambda key: (key.rows,), torch.long, "rows"),
        Slot("last", lambda key: (key.rows,), torch.long, "rows", repeat=True),
        Slot("scale", lambda key: (2,), torch.float32, "none"),
    )
    return StaticBuffers(slots, [LARGE, SMALL], "cpu")


def full(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value)


def test_each_slot_is_padded_by_its_own_policy_in_every_filling(buffers: StaticBuffers) -> None:
    """Buckets share storage, and each lies at the same address every time."""
    first = {name: view.data_ptr() for name, view in buffers.view(SMALL).items()}
    live = {"tokens": full(7, 2, 4), "lengths": full(4, 2), "last": torch.tensor([8, 9])}
    views = buffers.fill(LARGE, {**live, "scale": torch.tensor([1.0, 2.0])})
    assert views["tokens"].tolist() == [[7, 7, 7, 7, 0, 0]] * 2 + [[0] * 6] * 2
    assert [views[name].tolist() for name in ("lengths", "last")] == [[4, 4, 0, 0], [8, 9, 8, 8]]
    live = {"tokens": full(1, 1, 2), "lengths": full(2, 1), "last": full(3, 1)}
    views = buffers.fill(SMALL, live)
    assert {name: view.tolist() for name, view in views.items()} == {
        "tokens": [[1, 1, 0], [0, 0, 0]], "lengths": [2, 0], "last": [3, 3],
        "scale": [1.0, 2.0],  # was not filled
    }  # fmt: skip
    assert {name: view.data_ptr() for name, view in views.items()} == first
    assert all(view.is_contiguous() for view in views.values())


@pytest.mark.parametrize(
    ("slot", "shape"),
    [("tokens", (3, 3)), ("tokens", (2, 4)), ("tokens", (2,)), ("lengths", (3,)), ("scale", (1,))],
)
def test_what_a_bucket_does_not_hold_is_refused_by_the_slots_name(
    buffers: StaticBuffers, slot: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=f"slot '{slot}'"):
        buffers.fill(SMALL, {slot: torch.zeros(shape)})


def test_a_batch_goes_to_the_smallest_bucket_that_holds_it_or_without_padding_to_its_own() -> None:
    """Default tables reach the largest batch and no further; the largest is captured first."""
    sizes, table = (1, 2, 3, 8, 9), (2, 4, 8)
    assert [pad_to(size, table) for size in sizes] == [2, 2, 4, 8, None]
    assert [pad_to(size, table, padding=False) for size in sizes] == [None, 2, None, 8, None]
    assert [doubling(most) for most in (1, 6, 8)] == [(1,), (1, 2, 4, 6), (1, 2, 4, 8)]
    steps = [multiples(256, most) for most in (1, 512, 513)]
    assert steps == [(256,), (256, 512), (256, 512, 768)]
    keys = [ShapeKey(1, 8), ShapeKey(4, 8), ShapeKey(2, 16), ShapeKey(1, 8)]
    assert largest_first(keys) == [ShapeKey(4, 8), ShapeKey(2, 16), ShapeKey(1, 8)]


Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Inner:
    rows: torch.Tensor
    nothing: None = None


@dataclass
class State:
    inner: Inner
    by_name: dict[str, torch.Tensor]
    listed: list[torch.Tensor]
    pair: Pair


def test_a_state_of_any_nest_is_narrowed_in_its_memory_and_settled_where_it_lies_elsewhere() -> (
    None
):
    parts = [full(value, 4, 2) for value in range(5)]
    whole = State(Inner(parts[0]), {"b": parts[1]}, [parts[2]], Pair(parts[3], parts[4]))
    assert [int(tensor[0, 0]) for tensor in tensors(whole)] == [0, 1, 2, 3, 4]
    assert fault(whole, 4) is None
    part = narrow(whole, 2)
    assert (type(part.pair), part.inner.nothing) == (Pair, None)
    part.listed[0] = full(7, 2, 2)
    settle(whole, part)
    assert whole.listed[0].tolist() == [[7, 7], [7, 7], [2, 2], [2, 2]]
    assert whole.pair.first.eq(3).all()
    for tensor in tensors(narrow(whole, 2)):
        assert len(tensor) == 2
        tensor.fill_(9)
    assert all(tensor[:2].eq(9).all() and tensor[2:].ne(9).all() for tensor in tensors(whole))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"n": 3}, r"state\['n'\] is a int"),
        ([torch.zeros(3, 2), torch.zeros(2, 3)], r"state\[1\] is of shape \(2, 3\)"),
        (torch.zeros(()), r"state is of shape \(\)"),
        ((torch.zeros(3), object()), r"state\[1\] is a object"),
        (MappingProxyType({"n": torch.zeros(3)}), "state is a mappingproxy"),
    ],
)
def test_what_a_graph_would_freeze_is_named(wrong: object, why: str) -> None:
    assert re.search(why, str(fault(wrong, 3)))
