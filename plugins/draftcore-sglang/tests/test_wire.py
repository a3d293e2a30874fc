"""The form of an ask, and the settings of a server's environment."""

import json
from typing import Any

import pytest
import torch
from draftcore_sglang import server
from draftcore_sglang.remote import place
from draftcore_sglang.wire import Ask, Refusal, pack, unpack

from draftcore.errors import UsageError

BESIDE = {"loss_mask": pack(torch.tensor([True, False]))}
ASK = Ask("0f" * 12, ("hidden.3", "last_hidden"), "bfloat16", "origin", BESIDE, lent=True)
SENT = json.loads(json.dumps(ASK.to_json()))


@pytest.mark.parametrize(
    "data",
    [
        17,
        {},
        *(
            SENT | wrong
            for wrong in (
                {"version": 0},
                {"sample": "../../etc/passwd"},
                {"sample": "shm:elsewhere"},
                {"sample": "ab" * 12 + "\n"},
                {"names": ["weights"]},
                {"names": "hidden.1"},
                {"names": []},
                {"dtype": "float64"},
                {"origin": "p" * 5000},
                {"beside": {"../x": ["int64", ""]}},
                {"beside": {"mask": ["complex64", ""]}},
                {"beside": {f"mask{'_' * n}": ["int64", ""] for n in range(9)}},
                {"lent": "for long"},
                {"read": "0f"},
                {"more": 1},
            )
        ),
    ],
    ids=str,
)
def test_what_has_another_form_is_refused(data: Any) -> None:
    with pytest.raises(Refusal, match=r"the request's 'draftcore.*': ") as caught:
        Ask.from_json(data)
    assert caught.value.receipt["error"] == "refused"


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32"])
def test_an_ask_and_small_tensors_come_back_as_they_were_sent(dtype: str) -> None:
    assert Ask.from_json(SENT) == ASK
    value = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
    assert torch.equal(unpack(*pack(value)), value)
    assert len(unpack(*pack(value[:0]))) == 0


def test_layers_are_read_from_the_environment() -> None:
    assert server.read_layers("33, 2,18,2") == (2, 18, 33)
    assert server.read_layers("") == ()
    with pytest.raises(UsageError, match="2,18,33"):
        server.read_layers("2-18")


def test_a_server_is_left_as_it_is_without_a_sink_and_with_a_secret_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is called in every process of every sglang that has this dist beside it."""
    monkeypatch.delenv("DRAFTCORE_SINK", raising=False)
    server.register()
    monkeypatch.setenv("DRAFTCORE_SINK", "redis://user:secret@host/1")
    with pytest.raises(UsageError, match="user name or a password") as caught:
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
