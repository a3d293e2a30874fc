"""Decoding through graphs: the tokens of eager decoding, whatever ends when, and whatever moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Prompts = list[list[int]]
CONFIG = EvalOptions(max_new_tokens=12, batch=4)


class Decoding:
    """A target and a drafter, and a runner that decodes with them through graphs."""

    def __init__(
        self, target: TargetModel, drafter: Any, plugins: Sequence[GraphPlugin] = (), **changes: Any
    ) -> None:
        phase = Phase("decode", "recording", **{"rows": (1, 2, 4), "lengths": (32, 64), **changes})
        backend, self.target, self.drafter = RecordingBackend(), target, drafter
        self.runner = DecodeGraphRunner(target, drafter, drafter.module, phase, backend, plugins)
        self.counts = self.runner.counts

    def require_eager(self, prompts: Prompts, config: EvalOptions = CONFIG) -> list[Decoded]:
        """Decode through graphs and eagerly, to the same tokens, rounds and chances."""
        self.runner.reserve(len(prompts), max(map(len, prompts)) + config.max_new_tokens + 5)
        found = speculate(self.runner, prompts, config)
        assert found == speculate(EagerRunner(self.target, self.drafter), prompts, config)
        return found


def test_rows_may_propose_fewer_tokens_than_they_might(
    target: TargetModel, drafter: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the last token says."""
    propose: Callable[..., Proposal] = drafter.propose

    def fewer(state: dict[str, Tensor], *sampling: Any) -> Proposal:
        return replace(propose(state, *sampling), counts_B=state["last_B"] % 3)

    monkeypatch.setattr(drafter, "propose", fewer)
    found = Decoding(target, drafter).require_eager(prompts)
    assert {0, 1, 2} <= {room for row in found for room in row.room}


def test_every_bucket_replays_to_the_bits_of_eager(
    target: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    """Outputs, buffers, caches and the drafter's state, where real rows stand.

    Three rows are padded to four; rows end one by one, and others move into smaller buckets.
    """
    decoding = Decoding(target, drafter)
    found = decoding.require_eager(prompts[:3])
    assert any(accepted for row in found for accepted in row.accepted)
    decoding.require_eager(prompts)
    assert decoding.counts.keys() == {"replayed"}
    with torch.inference_mode():
        decoding.runner.admit(4, *right_padded(prompts, "cpu"))
    gaps = {key: largest_gap(decoding.runner, key) for key in sorted(decoding.runner.captured)}
    assert (len(gaps), set(gaps.values())) == (9, {0}), gaps


def test_a_row_of_padding_stands_where_the_row_it_repeats_stands(
    target: TargetModel, drafter: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where it is judged otherwise, as in half precision, or it would outrun its cache."""

    def lenient(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens_BT, counts_B, room_B = verify(*given)
        last_B = torch.arange(len(counts_B)) == 3
        return tokens_BT, torch.where(last_B, tokens_BT.shape[1], counts_B), room_B

    monkeypatch.setattr("draftcore_graphs.decode.verify", lenient)
    runner = Decoding(target, drafter).runner
    runner.reserve(4, 64)
    flight = runner.start(prompts[:3], 40, 0.0, seed=0)
    rows = runner.buffers.view(ShapeKey(4))
    for _ in range(3):
        flight.propose()
        flight.verify(64)
        assert rows["lengths_B"][3] == rows["lengths_B"][0] > len(prompts[0])
        assert rows["last_B"][3] == rows["last_B"][0]


def test_what_no_bucket_holds_decodes_eagerly_and_so_does_sampling(
    target: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    """With padding off, all but exact row counts."""
    exact = Decoding(target, drafter, padding=False, rows=(3,))
    exact.require_eager(prompts[:3])
    assert exact.counts["replayed"]
    assert exact.counts["not captured"]  # when one had ended, two were left
    exact.require_eager(prompts[:2])
    assert exact.counts["no bucket"] == 1
    small = Decoding(target, drafter, rows=(1, 2), lengths=(32,))
    small.require_eager(prompts)
    small.runner.start([prompts[2]], 20, 0.5, seed=0)
    assert (small.counts, small.runner.captures) == ({"no bucket": 2}, 0)
    small.require_eager([prompts[2]], EvalOptions(max_new_tokens=8, batch=1))
    assert small.counts["replayed"]


def test_weights_in_place_are_followed_and_moved_ones_are_captured_anew(
    target: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    decoding = Decoding(target, drafter, rows=(4,), lengths=(64,))  # two captures
    right = decoding.require_eager(prompts)
    drafter.module.weight.fill_(1)
    other = decoding.require_eager(prompts)
    assert (other != right, decoding.runner.captures) == (True, 2)
    drafter.module.weight = torch.zeros(1, dtype=torch.long)
    assert decoding.require_eager(prompts) == right
    assert decoding.runner.captures == 4
    ones = {"weight": torch.ones(1, dtype=torch.long)}
    drafter.module.load_state_dict(ones, assign=True)  # as at a resume
    assert decoding.require_eager(prompts) == other
    assert decoding.runner.captures == 6


def test_longer_batches_make_the_caches_grow_and_shorter_ones_do_not(
    target: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    decoding = Decoding(target, drafter)
    runner = decoding.runner
    runner.reserve(2, 30)
    assert (runner.most_rows, runner.span, len(runner.keys())) == (2, 32, 2 + 2)
    decoding.require_eager(prompts)
    captures = runner.captures
    decoding.require_eager(prompts[:1])
    assert (runner.most_rows, runner.span, runner.captures) == (4, 64, captures)


def test_caches_without_room_are_an_error_that_says_what_to_lower(
    target: TargetModel, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: int, max_len: int) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB, of which 1 GiB is free. Of more")

    monkeypatch.setattr(target, "allocate", full)
    asked = r"runner\.decode: no memory for caches of 4 rows x 80 tokens: .* 1 GiB is free\.\n"
    lower = r"  lower .*max_bs \(it is 4\) or .*lengths \(it is 64\), or set .*name=eager$"
    with pytest.raises(DraftcoreError, match=asked + lower):
        Decoding(target, drafter).runner.reserve(4, 40)


def test_a_sliding_window_target_decodes_the_same(
    windowed: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    Decoding(windowed, drafter).require_eager(prompts)


class Noting(GraphPlugin):
    def __init__(self, *, divide: bool = False) -> None:
        self.divide, self.captured, self.replayed = divide, list[ShapeKey](), list[Any]()

    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        self.captured.append(key)
        if self.divide:
            return lambda batch, **_: work({name: value[:1] for name, value in batch.items()})
        return work

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        self.replayed.append((key.variant, batch["lengths_B"].tolist(), batch["live_B"].tolist()))


def test_a_graph_plugin_sees_every_round_and_which_rows_are_real_and_may_not_divide_them(
    target: TargetModel, drafter: Any, prompts: Prompts
) -> None:
    plugin = Noting()
    decoding = Decoding(target, drafter, [plugin])
    decoding.require_eager(prompts[:3])
    assert len(plugin.captured) == decoding.runner.captures == 9
    real = [True, True, True, False]
    assert plugin.replayed[:2] == [(kind, [5, 20, 1, 5], real) for kind in ("draft", "verify")]
    assert len(plugin.replayed) == decoding.counts["replayed"]
    assert plugin.replayed[-1][2] in ([True], [True, True], [True, False])  # of a smaller bucket
    with pytest.raises(DraftcoreError, match=r"divided a batch of 4 .*\n.*'phase:prefill'"):
        Decoding(target, drafter, [Noting(divide=True)]).require_eager(prompts)
