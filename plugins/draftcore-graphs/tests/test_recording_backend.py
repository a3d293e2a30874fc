"""The backend that records on any device: what it promises beside what every backend does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draftcore_graphs.recording import RecordingBackend
from torch import Tensor

from draftcore.contracts.runner import Outputs, ShapeKey
from draftcore.errors import DraftcoreError

KEY = ShapeKey(2)


def recorded(fn: Callable[[], Outputs]) -> RecordingBackend:
    backend = RecordingBackend()
    with torch.inference_mode(), backend.capture_session():
        backend.capture_one(KEY, fn)
    return backend


def test_replay_calls_no_line_of_the_function() -> None:
    calls, x = [], torch.ones(2)

    def fn() -> Tensor:
        calls.append(1)
        return x + len(calls)  # computed on the host: frozen at the third call

    backend = recorded(fn)
    x.fill_(10)
    assert backend.replay(KEY).tolist() == [13.0, 13.0]
    assert len(calls) == 3


def test_moved_storage_is_not_seen() -> None:
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    backend = recorded(lambda: x * weight)
    weight.data.mul_(3)
    assert backend.replay(KEY).tolist() == [3.0, 3.0]
    weight.data = torch.full((2,), 100.0)
    assert backend.replay(KEY).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[: int(x.argmax())],
        lambda x: x[x > 0],
        lambda x: x.index_put((x > 0,), torch.zeros(())),
        lambda x: (x > 0).nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x if bool((x > 0).all()) else -x,
        lambda x: torch.unique(x),
    ],
)
def test_what_waits_for_the_device_is_refused(waits: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2)
    with pytest.raises(DraftcoreError, match="waits for the device"):
        recorded(lambda: waits(x))
