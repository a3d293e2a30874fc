"""Decoding through graphs: the tokens of eager decoding, whatever ends when, and whatever moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_sdk.replays import largest_gap
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.config import EvalConfig
from draftcore.contracts.runner import Batch, GraphPlugin, Outputs, ShapeKey, Work
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError
from draftcore.evaluation.decode import (
    Clock,
    EagerRunner,
    evaluate_prompts,
    right_padded,
    speculate,
    verify,
)
from draftcore.evaluation.report import Decoded
from draftcore.target import TransformersModel, TransformersTarget

CONFIG = EvalConfig(max_new_tokens=24, batch=4)


def make(
    target: TargetModel, drafter: Any, plugins: Sequence[GraphPlugin] = (), **changes: Any
) -> DecodeGraphRunner:
    phase = Phase("decode", "recording", **{"rows": (1, 2, 4), "lengths": (32, 64), **changes})
    return DecodeGraphRunner(target, drafter, drafter.module, phase, RecordingBackend(), plugins)


def decode(
    target: TargetModel,
    drafter: Any,
    prompts: list[list[int]],
    runner: DecodeGraphRunner | None = None,
    config: EvalConfig = CONFIG,
) -> list[Decoded]:
    if runner is not None:
        runner.reserve(len(prompts), max(map(len, prompts)) + config.max_new_tokens + 5)
    return speculate(runner or EagerRunner(target, drafter), prompts, config, Clock())


@pytest.mark.parametrize("count", [1, 3, 4])
def test_token_streams_and_acceptance_are_those_of_eager_decoding(
    target: TargetModel, drafter: Any, prompts: list[list[int]], count: int
) -> None:
    """Three rows are padded to four; rows end one by one, and others move into smaller buckets."""
    runner = make(target, drafter)
    graphs = decode(target, drafter, prompts[:count], runner)
    assert graphs == decode(target, drafter, prompts[:count])
    assert any(accepted > 0 for row in graphs for accepted in row.accepted)
    assert runner.counts.keys() == {"replayed"}


def test_every_bucket_replays_to_the_bits_of_eager(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    """Outputs, buffers, caches and the drafter's state, where real rows stand."""
    runner = make(target, drafter)
    decode(target, drafter, prompts, runner)
    with torch.inference_mode():
        runner.admit(4, *right_padded(prompts, "cpu"))
    assert len(runner.captured) == 9
    for key in sorted(runner.captured):
        assert largest_gap(runner, key) == 0, key


def test_a_replay_that_differs_in_a_cache_alone_shows(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    """The comparison itself can fail."""

    class Meddling(RecordingBackend):
        def replay(self, key: ShapeKey) -> Outputs:
            found = super().replay(key)
            runner.cache.tensors()[0][0, 0].add_(0.5)
            return found

    phase = Phase("decode", "recording", rows=(2,), lengths=(32,))
    runner = DecodeGraphRunner(target, drafter, drafter.module, phase, Meddling())
    runner.reserve(2, 30)
    with torch.inference_mode():
        runner.ready(runner.keys())
    assert [largest_gap(runner, key) for key in sorted(runner.captured)] == pytest.approx(
        [0.5, 0.5]
    )


def test_an_evaluation_through_graphs_is_lossless(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    config = CONFIG.model_copy(update={"batch": 3})
    report = evaluate_prompts(runner, prompts, config)
    eager = evaluate_prompts(EagerRunner(target, drafter), prompts, config)
    assert report.lossless is True
    assert report.acceptance_by_position == eager.acceptance_by_position
    assert report.plain_seconds > 0


def test_a_batch_leaves_nothing_behind_for_the_next(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    decode(target, drafter, prompts, runner)
    again = prompts[::-1][:3]
    assert decode(target, drafter, again, runner) == decode(target, drafter, again)


@torch.inference_mode()
def test_warming_up_and_capturing_leave_nothing_for_the_first_batch(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    """They call the work several times, which moves rows on and writes the caches."""
    runner = make(target, drafter)
    runner.reserve(4, 64)
    tokens_BT, lengths_B = right_padded(prompts, "cpu")
    flights = []
    for _ in range(2):
        runner.forget()
        for tensor in runner.cache.tensors():
            tensor.fill_(3.0)
        flight = runner.start(tokens_BT, lengths_B, 60, 0.0, torch.Generator())
        rows = {name: value.clone() for name, value in runner.buffers.view(ShapeKey(4)).items()}
        flight.propose()
        flights.append((rows, flight.verify(64)))
    (first, tokens), (second, again) = flights
    assert first["lengths_B"].tolist() == lengths_B.tolist()
    assert all(torch.equal(first[name], second[name]) for name in ("last_B", "lengths_B", "live_B"))
    assert all(torch.equal(one, other) for one, other in zip(tokens, again, strict=True))


def test_a_row_of_padding_stands_where_the_row_it_repeats_stands(
    target: TargetModel, drafter: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it is judged otherwise, as in half precision, or it would outrun its cache."""

    def lenient(
        logits_BTV: Tensor,
        drafts_BK: Tensor,
        draft_probs_BKV: Tensor | None,
        temperature: float,
        generator: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens_BT, counts_B = verify(logits_BTV, drafts_BK, draft_probs_BKV, temperature, generator)
        last_B = torch.arange(len(counts_B)) == 3
        return tokens_BT, torch.where(last_B, drafts_BK.shape[1] + 1, counts_B)

    monkeypatch.setattr("draftcore_graphs.decode.verify", lenient)
    runner = make(target, drafter)
    runner.reserve(4, 64)
    tokens_BT, lengths_B = right_padded(prompts[:3], "cpu")
    flight = runner.start(tokens_BT, lengths_B, 40, 0.0, torch.Generator())
    rows = runner.buffers.view(ShapeKey(4))
    for _ in range(3):
        flight.propose()
        flight.verify(64)
        assert rows["lengths_B"][3] == rows["lengths_B"][0] > lengths_B[0]
        assert rows["last_B"][3] == rows["last_B"][0]


def test_with_padding_off_only_exact_row_counts_replay(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter, padding=False, rows=(3,))
    assert decode(target, drafter, prompts[:3], runner) == decode(target, drafter, prompts[:3])
    assert runner.counts["replayed"] > 0
    assert runner.counts["not captured"] > 0  # when one had ended, two were left
    assert decode(target, drafter, prompts[:2], runner) == decode(target, drafter, prompts[:2])
    assert runner.counts["no bucket"] == 1


def test_batches_that_no_bucket_holds_decode_eagerly(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter, rows=(1, 2), lengths=(32,))
    assert decode(target, drafter, prompts, runner) == decode(target, drafter, prompts)
    assert runner.counts == {"no bucket": 1}
    short = [prompts[2]]
    config = EvalConfig(max_new_tokens=8, batch=1)
    found = decode(target, drafter, short, runner, config)
    assert found == decode(target, drafter, short, config=config)
    assert runner.counts["replayed"] > 0


def test_a_sampled_batch_is_never_replayed(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    runner.reserve(4, 64)
    tokens_BT, lengths_B = right_padded(prompts, "cpu")
    runner.start(tokens_BT, lengths_B, 60, 0.5, torch.Generator())
    assert runner.counts == {"no bucket": 1}
    assert runner.captures == 0


def test_captures_serve_every_later_batch(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    for _ in range(2):
        decode(target, drafter, prompts, runner)
    assert runner.captures == 3 + 3 * 2  # drafts by rows, verdicts by rows and span


def test_weights_in_place_are_followed_and_moved_ones_are_captured_anew(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    right = decode(target, drafter, prompts, runner)
    drafter.module.shift.data.fill_(1)
    shifted = decode(target, drafter, prompts, runner)
    assert shifted == decode(target, drafter, prompts) != right
    assert runner.captures == 9
    drafter.module.shift.data = torch.zeros(1)
    assert decode(target, drafter, prompts, runner) == right
    assert runner.captures == 18
    drafter.module.load_state_dict({"shift": torch.ones(1)}, assign=True)  # as at a resume
    assert decode(target, drafter, prompts, runner) == shifted
    assert runner.captures == 27


def test_longer_batches_make_the_caches_grow_and_shorter_ones_do_not(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter)
    runner.reserve(2, 30)
    assert (runner.most_rows, runner.span) == (2, 32)
    decode(target, drafter, prompts, runner)
    assert (runner.most_rows, runner.span) == (4, 64)
    captures = runner.captures
    decode(target, drafter, prompts[:1], runner)
    assert runner.captures == captures


def test_a_drafter_that_asks_the_host_is_refused(
    target: TargetModel, drafter: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda state: (int(state.last_B[0]), propose(state))[1])
    with pytest.raises(DraftcoreError, match="waits for the device"):
        decode(target, drafter, prompts, make(target, drafter))


def test_a_sliding_window_target_decodes_the_same(
    tmp_path: Path, drafter: Any, prompts: list[list[int]]
) -> None:
    layers = ["sliding_attention", "full_attention"] * 3
    folder = tiny_target(tmp_path, layer_types=layers, use_sliding_window=True, sliding_window=8)
    target = TransformersModel(TransformersTarget(str(folder), device="cpu"))
    found = decode(target, drafter, prompts, make(target, drafter))
    assert found == decode(target, drafter, prompts)


class Noting(GraphPlugin):
    def __init__(self) -> None:
        self.captured, self.replayed = [], []

    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        self.captured.append(key)
        return work

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        self.replayed.append((key.variant, batch["lengths_B"].tolist(), batch["live_B"].tolist()))


def test_a_graph_plugin_sees_every_round_and_which_rows_are_real(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    plugin = Noting()
    runner = make(target, drafter, [plugin])
    decode(target, drafter, prompts[:3], runner)
    assert len(plugin.captured) == runner.captures == 9
    real = [True, True, True, False]
    assert plugin.replayed[0] == ("draft", [5, 20, 1, 5], real)
    assert plugin.replayed[1] == ("verify", [5, 20, 1, 5], real)
    assert len(plugin.replayed) == runner.counts["replayed"]
    assert plugin.replayed[-1][2] in ([True], [True, True], [True, False])  # of a smaller bucket


def test_a_graph_plugin_that_divides_what_is_decoded_is_refused(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    class Dividing(Noting):
        def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
            return lambda whole: work({name: value[:1] for name, value in whole.items()})

    with pytest.raises(DraftcoreError, match=r"divided a batch of 4 .*\n.*'phase:prefill'"):
        decode(target, drafter, prompts, make(target, drafter, [Dividing()]))
