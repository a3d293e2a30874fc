"""The form of an ask, and the settings of a server's environment."""

from typing import Any

import pytest
import torch
from draftcore_sglang import server
from draftcore_sglang.remote import place
from draftcore_sglang.wire import Ask, Refusal, pack, unpack

from draftcore.errors import DraftcoreError, UsageError


def test_an_ask_comes_back_as_it_was_sent() -> None:
    beside = {"loss_mask": pack(torch.tensor([True, False]))}
    ask = Ask("0f" * 12, ("hidden.3", "last_hidden"), "bfloat16", "origin", beside, lent=True)
    assert Ask.from_json(ask.to_json()) == ask


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32"])
def test_small_tensors_travel_bit_by_bit(dtype: str) -> None:
    value = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
    assert torch.equal(unpack(*pack(value)), value)
    assert len(unpack(*pack(value[:0]))) == 0


@pytest.mark.parametrize("data", [None, [], "x", {"version": 1}, {"version": True}])
def test_anything_else_is_refused(data: Any) -> None:
    with pytest.raises(Refusal) as caught:
        Ask.from_json(data)
    assert caught.value.receipt["error"] == "refused"


def test_layers_are_read_from_the_environment() -> None:
    assert server.read_layers("33, 2,18,2") == (2, 18, 33)
    assert server.read_layers("") == ()
    with pytest.raises(UsageError, match="2,18,33"):
        server.read_layers("2-18")


def test_without_a_sink_a_server_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called in every process of every sglang that has this dist beside it."""
    monkeypatch.delenv("DRAFTCORE_SINK", raising=False)
    server.register()


def test_a_sink_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTCORE_SINK", "redis://user:secret@host/1")
    with pytest.raises(DraftcoreError) as caught:
        server.register()
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("shm:run7", "shm:run7?max_bytes=1GiB", True),
        ("mooncake://h:1/run7?segment=a", "mooncake://h:1/run7", True),
        ("mooncake://h:1/run7", "mooncake://h:1/run8", False),
        ("shm:a%20b", "shm:a b", True),
    ],
)
def test_stores_are_told_apart_by_what_is_not_an_option(one: str, other: str, same: bool) -> None:
    assert (place(one) == place(other)) is same
