"""Segments and the eager functions between them, on the CPU; on CUDA in test_cuda_backends.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_graphs.breaks import run_eager
from draftcore_graphs.prefill import eager_attention
from draftcore_graphs.segments import Break, record_eager
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from draftcore.contracts.runner import Outputs, ShapeKey
from draftcore.errors import DraftcoreError

KEY = ShapeKey(2, 3)


def captured(backend: SegmentBackend, fn: Callable[[], Outputs]) -> SegmentBackend:
    with backend.capture_session():
        backend.capture_one(KEY, fn)
    return backend


def test_a_break_runs_anew_at_every_replay_and_the_rest_does_not(
    backend: SegmentBackend, segments: Any
) -> None:
    x, calls = torch.ones(3), {"inside": 0, "outside": 0}

    def scaled(value: Tensor) -> Tensor:
        calls["inside"] += 1
        return value * calls["inside"]

    def work() -> Tensor:
        calls["outside"] += 1
        return run_eager(scaled, x + 1) - 1

    captured(backend, work)
    assert (segments.ended, calls) == (2, {"inside": 3, "outside": 3})
    x.fill_(10)
    assert backend.replay(KEY).tolist() == [43.0] * 3  # 4 * 11 - 1
    assert calls == {"inside": 4, "outside": 3}


def test_a_break_sees_true_values_while_it_is_recorded(backend: SegmentBackend) -> None:
    """A capture computes nothing, so a segment runs as soon as it is recorded."""
    x, seen = torch.full((3,), 5.0), []

    def look(value: Tensor) -> Tensor:
        seen.append(value.tolist())
        return value

    captured(backend, lambda: run_eager(look, run_eager(look, x * 2) + 1))
    assert seen == 3 * [[10.0] * 3, [11.0] * 3]


def test_outputs_lie_where_they_lay_whatever_a_break_allocates(backend: SegmentBackend) -> None:
    x = torch.ones(3)
    captured(backend, lambda: {"sum": run_eager(lambda v: v.clone(), x) + x, "none": None})
    first = backend.replay(KEY)
    address = first["sum"].data_ptr()
    x.fill_(2)
    again = backend.replay(KEY)
    assert again["sum"].data_ptr() == address
    assert again["none"] is None
    assert again["sum"].tolist() == [4.0] * 3


def test_breaks_take_and_return_nested_tensors_and_objects(backend: SegmentBackend) -> None:
    x = torch.arange(3.0)

    def attention(
        value: Tensor, rope: tuple[Tensor, Tensor], name: str, cache: None
    ) -> tuple[Tensor, None]:
        assert (name, cache) == ("layer", None)
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
    x = torch.ones(3)
    captured(backend, lambda: run_eager(lambda v: run_eager(torch.neg, v) + 1, x * 3) * 2)
    assert segments.ended == 2
    x.fill_(2)
    assert backend.replay(KEY).tolist() == [-10.0] * 3


def test_a_break_may_be_first_and_last_and_follow_another(backend: SegmentBackend) -> None:
    x = torch.ones(3)
    captured(backend, lambda: run_eager(torch.neg, run_eager(torch.exp, x)))
    x.fill_(0)
    assert backend.replay(KEY).tolist() == [-1.0] * 3


def test_a_break_that_returns_another_shape_than_recorded_is_refused(
    backend: SegmentBackend,
) -> None:
    x, width = torch.ones(3), [3]
    captured(backend, lambda: run_eager(lambda v: v[: width[0]].clone(), x) + 1)
    width[0] = 1  # copy_ would broadcast it
    with pytest.raises(DraftcoreError, match="must return the same shapes"):
        backend.replay(KEY)


def test_a_break_that_returns_no_tensors_is_refused(backend: SegmentBackend) -> None:
    with pytest.raises(DraftcoreError, match=r"returned a str\b"):
        captured(backend, lambda: run_eager(lambda: "text"))


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_an_error_anywhere_leaves_the_backend_usable(
    backend: SegmentBackend, segments: Any, where: str
) -> None:
    x, bad = torch.ones(3), [False]

    def fail(place: str) -> None:
        if bad[0] and place == where:
            raise ValueError(place)

    def attend(value: Tensor) -> Tensor:
        fail("inside")
        return value * 2

    def work() -> Tensor:
        fail("before")
        out = run_eager(attend, x + 1)
        fail("after")
        return out + 1

    calls = iter([False, False, True])

    def work_but_not_recorded() -> Tensor:
        bad[0] = next(calls)
        return work()

    with pytest.raises(ValueError, match=where):
        captured(backend, work_but_not_recorded)
    assert segments.tape is None
    assert not backend.can_run({}, KEY)
    bad[0] = False
    captured(backend, work)
    assert backend.replay(KEY).tolist() == [5.0] * 3


def test_a_wait_for_the_host_fails_in_a_segment_and_may_stand_in_a_break(
    backend: SegmentBackend,
) -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"):
        captured(backend, lambda: x * float(x.sum().item()))
    captured(backend, lambda: run_eager(lambda v: v * float(v.sum().item()), x) + 1)
    x.fill_(2)
    assert backend.replay(KEY).tolist() == [13.0] * 3


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


def test_without_breaks_the_whole_is_one_segment(segments: Any) -> None:
    backend, x = SegmentBackend(lambda device: segments), torch.ones(3)
    captured(backend, lambda: run_eager(torch.neg, x) + 1)
    assert segments.ended == 1
    x.fill_(4)
    assert backend.replay(KEY).tolist() == [-3.0] * 3


def test_writes_in_place_into_static_buffers_replay(backend: SegmentBackend) -> None:
    """What decoding does: its graphs return nothing."""
    position, cache = torch.zeros(1, dtype=torch.long), torch.zeros(4)

    def work() -> None:
        cache[position] = run_eager(torch.add, position, 1).float()
        position.add_(1)

    captured(backend, work)
    position.zero_()
    cache.zero_()
    for _ in range(4):
        assert backend.replay(KEY) is None
    assert cache.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_weights_updated_in_place_replay_as_they_are_now(backend: SegmentBackend) -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    captured(backend, lambda: run_eager(torch.relu, layer(x)))
    with torch.no_grad():
        layer.weight.mul_(-2)
        assert torch.equal(backend.replay(KEY), torch.relu(layer(x)))


def test_a_model_with_attention_as_breaks_replays_to_the_bits_of_eager(
    backend: SegmentBackend, segments: Any
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, num_key_value_heads=2, **sizes)
    model = LlamaModel(config).eval().requires_grad_(False)
    tokens_BT = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.zeros(2, 1, 5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), -1e30)
    positions = torch.arange(5)[None]

    @torch.inference_mode()
    def work() -> Tensor:
        return model(
            input_ids=tokens_BT, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state

    with eager_attention(model.layers):
        captured(backend, work)
    assert segments.ended == 1 + 3
    tokens_BT.copy_(torch.randint(64, (2, 5)))
    assert torch.equal(backend.replay(KEY), work())


def test_replaying_what_was_not_captured_is_refused(backend: SegmentBackend) -> None:
    captured(backend, lambda: torch.ones(1))
    with pytest.raises(DraftcoreError, match="there is 2 x 3"):
        backend.replay(ShapeKey(9, 9))
    backend.cleanup()
    assert not backend.can_run({}, KEY)
    with pytest.raises(DraftcoreError, match="there is nothing"):
        backend.replay(KEY)
    assert captured(backend, lambda: torch.ones(1)).can_run({}, KEY)


def test_a_session_keeps_the_garbage_collector_out_and_gives_it_back(
    backend: SegmentBackend,
) -> None:
    import gc

    with backend.capture_session():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        with backend.capture_session():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
