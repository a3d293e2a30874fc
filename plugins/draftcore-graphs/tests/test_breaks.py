"""What records on the CPU: `recording`, and segments with eager functions between them.

Segments on CUDA are in test_cuda_backends.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_graphs.breaks import run_eager
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.segments import Break, record_eager
from torch import Tensor

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import DraftcoreError

KEY = ShapeKey(2, 3)


def captured(backend: GraphBackend, fn: Callable[[], Outputs]) -> GraphBackend:
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(KEY, fn)
    return backend


# ---------------------------------------------------------------- the backend `recording`


def test_a_recording_replays_no_line_of_the_function_at_the_addresses_that_there_were() -> None:
    calls, weight, x = [], torch.nn.Parameter(torch.ones(2)), torch.ones(2)

    def fn() -> Tensor:
        calls.append(1)
        return x * weight + len(calls)  # computed on the host: frozen at the third call

    backend = captured(RecordingBackend(), fn)
    x.fill_(10)
    weight.data.mul_(3)
    assert backend.replay(KEY).tolist() == [33.0, 33.0]
    weight.data = torch.full((2,), 100.0)
    assert backend.replay(KEY).tolist() == [33.0, 33.0]
    assert len(calls) == 3


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
        captured(RecordingBackend(), lambda: waits(x))


# ---------------------------------------------------------------- breaks


def test_a_break_runs_anew_at_every_replay_and_the_rest_does_not(
    backend: SegmentBackend, segments: Any
) -> None:
    x, calls = torch.ones(3), {"inside": 0, "outside": 0}

    def scaled(value: Tensor) -> Tensor:
        calls["inside"] += 1
        return value * calls["inside"]

    def work() -> Any:
        calls["outside"] += 1
        return run_eager(scaled, x + 1) - 1

    captured(backend, work)
    assert (segments.ended, calls) == (2, {"inside": 3, "outside": 3})
    x.fill_(10)
    assert backend.replay(KEY).tolist() == [43.0] * 3  # 4 * 11 - 1
    assert calls == {"inside": 4, "outside": 3}


def test_breaks_take_and_return_nested_tensors_and_objects(backend: SegmentBackend) -> None:
    x = torch.arange(3.0)

    def attention(value: Tensor, rope: tuple[Tensor, Tensor], *rest: Any) -> tuple[Tensor, None]:
        assert rest == ("layer", None)
        return value * rope[0] + rope[1], None

    def work() -> tuple[Tensor, ...]:
        out, weights = run_eager(attention, x + 1, (x.cos(), x.sin()), "layer", None)
        assert weights is None
        return out, out * 2

    captured(backend, work)
    x.copy_(torch.tensor([0.5, -1.0, 2.0]))
    for ours, eager in zip(backend.replay(KEY), work(), strict=True):
        assert torch.equal(ours, eager)


def test_a_break_within_a_break_is_part_of_it(backend: SegmentBackend, segments: Any) -> None:
    """And sees true values while it is recorded, as a segment runs as soon as it is."""
    x, seen = torch.ones(3), []

    def outer(value: Tensor) -> Any:
        seen.append(value.tolist())
        return run_eager(torch.neg, value) + 1

    captured(backend, lambda: run_eager(outer, x * 3) * 2)
    assert (segments.ended, seen) == (2, 3 * [[3.0] * 3])
    x.fill_(2)
    assert backend.replay(KEY).tolist() == [-10.0] * 3


def test_a_break_that_returns_another_shape_than_recorded_or_no_tensors_is_refused(
    backend: SegmentBackend,
) -> None:
    x, width = torch.ones(3), [3]
    captured(backend, lambda: run_eager(lambda v: v[: width[0]].clone(), x) + 1)
    width[0] = 1  # copy_ would broadcast it
    with pytest.raises(DraftcoreError, match="must return the same shapes"):
        backend.replay(KEY)
    with pytest.raises(DraftcoreError, match=r"returned a str\b"):
        captured(backend, lambda: run_eager(lambda: "text"))


def test_an_error_in_a_break_leaves_the_backend_usable_and_a_wait_for_the_host_is_none(
    backend: SegmentBackend, segments: Any
) -> None:
    x, calls = torch.ones(3), []

    def attend(value: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("on purpose")
        return value * float(value.sum().item())

    with pytest.raises(ValueError, match="on purpose"):
        captured(backend, lambda: run_eager(attend, x + 1) + 1)
    assert segments.tape is None
    assert not backend.can_run({}, KEY)
    captured(backend, lambda: run_eager(attend, x) + 1)
    x.fill_(2)
    assert backend.replay(KEY).tolist() == [13.0] * 3
    with pytest.raises(DraftcoreError, match="waits for the device"):
        captured(backend, lambda: x * float(x.sum().item()))


def test_debug_is_one_break(segments: Any) -> None:
    """So whatever goes wrong in it is not the recording's fault."""
    backend = SegmentBackend(lambda device: segments, breaks=True, debug=True)
    x, calls = torch.ones(2, 1), []

    def work() -> dict[str, Tensor]:
        calls.append(1)
        return {"wide": x.expand(2, 3), "own": run_eager(torch.neg, x)}

    captured(backend, work)
    assert (len(calls), segments.ended) == (3, 0)
    x.fill_(7)
    first = backend.replay(KEY)
    assert (first["wide"].tolist(), first["own"].tolist()) == ([[7.0] * 3] * 2, [[-7.0]] * 2)
    assert len(calls) == 4
    (step,) = record_eager(work).steps
    assert isinstance(step, Break)


def test_replaying_what_was_not_captured_is_refused(backend: SegmentBackend) -> None:
    captured(backend, lambda: torch.ones(1))
    with pytest.raises(DraftcoreError, match="there is 2 x 3"):
        backend.replay(ShapeKey(9, 9))
    backend.cleanup()
    with pytest.raises(DraftcoreError, match="there is nothing"):
        backend.replay(KEY)


def test_a_session_keeps_the_garbage_collector_out_and_leaves_nothing_frozen(
    backend: SegmentBackend,
) -> None:
    """Else what a run holds in cycles would stay; Python 3.12 begins with frozen objects."""
    gc.freeze()
    with backend.capture_session():
        with backend.capture_session():
            pass
        assert (gc.isenabled(), gc.get_freeze_count() > 0) == (False, True)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
