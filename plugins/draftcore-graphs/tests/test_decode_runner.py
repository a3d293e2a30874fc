"""Decoding through graphs: the tokens of eager decoding, whatever ends when, and whatever moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftcore_eval.decode import EagerRunner, right_padded, speculate
from draftcore_eval.options import EvalOptions
from draftcore_eval.proposals import verify
from draftcore_eval.report import Decoded
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_sdk.replays import largest_gap
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.runner import Batch, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError

CONFIG = EvalOptions(max_new_tokens=12, batch=4)


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
    config: EvalOptions = CONFIG,
) -> list[Decoded]:
    if runner is not None:
        runner.reserve(len(prompts), max(map(len, prompts)) + config.max_new_tokens + 5)
    return speculate(runner or EagerRunner(target, drafter), prompts, config)


@pytest.mark.parametrize(("count", "captures"), [(1, 1 + 1), (3, 3 + 3 * 2)])
def test_token_streams_and_acceptance_are_those_of_eager_decoding(
    target: TargetModel, drafter: Any, prompts: list[list[int]], count: int, captures: int
) -> None:
    """Three rows are padded to four; rows end one by one, and others move into smaller buckets.

    A second batch goes through the captures of the first: drafts by rows, verdicts by rows and span.
    """
    runner = make(target, drafter)
    for batch in (prompts[:count], prompts[:count][::-1]):
        graphs = decode(target, drafter, batch, runner)
        assert graphs == decode(target, drafter, batch)
        assert any(accepted > 0 for row in graphs for accepted in row.accepted)
    assert runner.counts.keys() == {"replayed"}
    assert runner.captures == captures


def test_rows_may_propose_fewer_tokens_than_they_might(
    target: TargetModel, drafter: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the last token says: rounds and chances are those of eager decoding."""
    propose = drafter.propose

    def fewer(state: dict[str, Tensor], *sampling: Any) -> Proposal:
        return replace(propose(state, *sampling), counts_B=state["last_B"] % 3)

    monkeypatch.setattr(drafter, "propose", fewer)
    graphs = decode(target, drafter, prompts, make(target, drafter))
    assert graphs == decode(target, drafter, prompts)
    assert {0, 1, 2} <= {room for row in graphs for room in row.room}


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


def test_a_row_of_padding_stands_where_the_row_it_repeats_stands(
    target: TargetModel, drafter: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it is judged otherwise, as in half precision, or it would outrun its cache."""

    def lenient(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens_BT, counts_B, room_B = verify(*given)
        last_B = torch.arange(len(counts_B)) == 3
        return tokens_BT, torch.where(last_B, tokens_BT.shape[1], counts_B), room_B

    monkeypatch.setattr("draftcore_graphs.decode.verify", lenient)
    runner = make(target, drafter)
    runner.reserve(4, 64)
    flight = runner.start(prompts[:3], 40, 0.0, seed=0)
    rows = runner.buffers.view(ShapeKey(4))
    for _ in range(3):
        flight.propose()
        flight.verify(64)
        assert rows["lengths_B"][3] == rows["lengths_B"][0] > len(prompts[0])
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


def test_batches_that_no_bucket_holds_and_sampled_ones_decode_eagerly(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter, rows=(1, 2), lengths=(32,))
    assert decode(target, drafter, prompts, runner) == decode(target, drafter, prompts)
    runner.start([prompts[2]], 20, 0.5, seed=0)
    assert (runner.counts, runner.captures) == ({"no bucket": 2}, 0)
    config = EvalOptions(max_new_tokens=8, batch=1)
    found = decode(target, drafter, [prompts[2]], runner, config)
    assert found == decode(target, drafter, [prompts[2]], config=config)
    assert runner.counts["replayed"] > 0


def test_weights_in_place_are_followed_and_moved_ones_are_captured_anew(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    runner = make(target, drafter, rows=(4,), lengths=(64,))  # two captures
    right = decode(target, drafter, prompts, runner)
    drafter.module.shift.data.fill_(1)
    shifted = decode(target, drafter, prompts, runner)
    assert shifted == decode(target, drafter, prompts) != right
    assert runner.captures == 2
    drafter.module.shift.data = torch.zeros(1)
    assert decode(target, drafter, prompts, runner) == right
    assert runner.captures == 4
    drafter.module.load_state_dict({"shift": torch.ones(1)}, assign=True)  # as at a resume
    assert decode(target, drafter, prompts, runner) == shifted
    assert runner.captures == 6


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


def test_a_sliding_window_target_decodes_the_same(
    windowed: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    found = decode(windowed, drafter, prompts, make(windowed, drafter))
    assert found == decode(windowed, drafter, prompts)


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
