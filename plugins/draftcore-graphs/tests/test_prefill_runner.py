"""Capture through graphs: padding, refusal, slicing, moved weights, and what a graph must not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from draftcore_eval.decode import right_padded
from draftcore_graphs.backend import SegmentBackend
from draftcore_graphs.divided import DividedRow
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.prefill import PrefillGraphRunner, static_features
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_sdk.replays import largest_gap
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Batch, Outputs, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError, UsageError

Prompts = list[list[int]]
REQUEST = FeatureRequest((1, 4), True, "float32", topk=3, embeddings=True)
ROUNDING = 2e-6  # fp32, another padded shape: 1.2e-6 seen at numbers of about 3 (2026-11)


def make(
    target: TargetModel,
    backend: Any = None,
    plugins: Any = (),
    *,
    breaks: bool = False,
    **changes: Any,
) -> PrefillGraphRunner:
    given = {"rows": (2, 4), "lengths": (8, 32), "decided": {"backend": "you"}, **changes}
    phase = Phase("prefill", "recording", **given)
    return PrefillGraphRunner(target, phase, backend or RecordingBackend(), plugins, breaks=breaks)


def require_near(runner: Any, target: TargetModel, rows: Prompts) -> Mapping[str, Tensor]:
    """Return a runner's features of some rows, which are the target's own within rounding."""
    given = right_padded(rows, "cpu")
    found, eager = (one.features(*given, REQUEST) for one in (runner, target))
    assert tuple(found) == REQUEST.names
    for name, value_BTH in eager.items():
        assert found[name].shape == value_BTH.shape
        for row, length in enumerate(given[1].tolist()):
            gap = (found[name][row, :length] - value_BTH[row, :length]).abs().max()
            assert gap <= ROUNDING, name
    return found


def test_every_bucket_replays_to_the_bits_of_eager_on_the_same_padded_batch(
    target: TargetModel, prompts: Prompts
) -> None:
    runner = make(target)
    for batch in (prompts, prompts[:2], prompts[2:], [prompts[0]] * 4, prompts[1:3], prompts[:1]):
        require_near(runner, target, batch)
    assert (runner.counts, len(runner.captured)) == ({"replayed": 6}, 4)
    assert [largest_gap(runner, key) for key in runner.captured] == [0] * 4


@pytest.mark.parametrize(
    ("padding", "counts"),
    [(True, {"no bucket": 2, "replayed": 4}), (False, {"no bucket": 4, "replayed": 2})],
)
def test_what_no_bucket_holds_runs_eagerly_and_is_counted(
    target: TargetModel, padding: bool, counts: dict[str, int]
) -> None:
    """With padding off, all but exact shapes."""
    runner = make(target, padding=padding)
    for rows, length in ((5, 2), (1, 33)):
        given = right_padded([[3] * length] * rows, "cpu")
        found = runner.features(*given, REQUEST)
        for name, value in target.features(*given, REQUEST).items():
            assert torch.equal(found[name], value)
    assert (runner.counts, runner.captures) == ({"no bucket": 2}, 0)
    for rows, length in ((2, 8), (2, 7), (3, 8), (4, 32)):
        runner.features(*right_padded([[5] * length] * rows, "cpu"), REQUEST)
    assert runner.counts == counts


class Refusing(RecordingBackend):
    """Cannot run a batch, or has no memory for the graphs of buckets of 32 tokens."""

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        self.small, self.tried = small, 0

    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        self.tried += 1
        if self.small and key.length == 32:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB, of which 1 GiB is free. Of more")
        super().capture_one(key, fn)

    def can_run(self, batch: Batch, key: ShapeKey) -> bool:
        assert batch["lengths_B"].tolist() == [5, 20, 1, 7] or key.length == 8
        return self.small


def test_what_the_backend_refuses_runs_as_it_is(target: TargetModel, prompts: Prompts) -> None:
    runner = make(target, Refusing())
    require_near(runner, target, prompts)
    assert runner.counts == {"refused": 1}


def test_a_bucket_without_memory_runs_as_it_is_unless_the_user_chose_it(
    target: TargetModel, prompts: Prompts
) -> None:
    """Which is not tried again, and leaves the smaller ones alone."""
    runner = make(target, backend := Refusing(small=True))
    for batch in (prompts, prompts[:1], prompts):
        require_near(runner, target, batch)
    assert backend.tried == 4
    assert (runner.counts, runner.captures) == ({"out of memory": 2, "replayed": 1}, 2)
    for chosen in ("rows", "lengths", "max_bs"):
        runner = make(target, Refusing(small=True), decided={chosen: "you"})
        asked = r"runner\.prefill: no memory for a graph of 4 rows x 32: .* 1 GiB is free\.\n"
        lower = r"  lower .*max_bs \(it is 4\) or .*lengths \(it is 32\), or set .*name=eager$"
        with pytest.raises(DraftcoreError, match=asked + lower):
            runner.features(*right_padded(prompts, "cpu"), REQUEST)
        assert runner.captured == set()


def test_requests_are_captured_apart_and_cast_to_their_type(
    target: TargetModel, prompts: Prompts
) -> None:
    runner, given = make(target), right_padded(prompts, "cpu")
    runner.features(*given, REQUEST)
    found = runner.features(*given, FeatureRequest((2,), False, "bfloat16"))
    assert {name: value.dtype for name, value in found.items()} == {"hidden.2": torch.bfloat16}
    assert tuple(runner.features(*given, REQUEST)) == REQUEST.names
    assert runner.captures == 8


def test_weights_that_move_are_captured_anew_and_those_in_place_are_not(
    own_target: Any, prompts: Prompts
) -> None:
    runner, weight = make(own_target), own_target.layers[0].mlp.up_proj.weight
    before = require_near(runner, own_target, prompts)
    weight.data.mul_(1.5)
    after = require_near(runner, own_target, prompts)
    assert not torch.equal(after["hidden.1"], before["hidden.1"])
    assert runner.captures == 4
    weight.data = weight.data * 0.5
    require_near(runner, own_target, prompts)
    assert runner.captures == 8


def test_a_sliding_window_target_keeps_its_window(windowed: TargetModel, prompts: Prompts) -> None:
    runner = make(windowed)
    require_near(runner, windowed, prompts)
    assert not runner.masks_differ


def test_a_model_that_makes_another_mask_is_refused_by_the_rule_or_runs_eagerly(
    own_target: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decoder adds a mask of its own to ours, as a model that ignores ours would."""
    masks, given = own_target.masks, right_padded(prompts, "cpu")
    monkeypatch.setattr(own_target, "masks", lambda *asked: torch.zeros_like(masks(*asked)))
    with pytest.raises(UsageError, match="the rule 'masks' refuses it"):
        make(own_target).features(*given, REQUEST)
    runner = make(own_target, decided={"backend": "auto, for cpu"})
    for _ in range(2):
        found, eager = (one.features(*given, REQUEST) for one in (runner, own_target))
        assert all(torch.equal(found[name], eager[name]) for name in REQUEST.names)
    assert runner.counts == {"replayed": 1, "rule masks": 1}


def test_a_model_that_asks_the_host_is_refused_and_nothing_is_left(
    own_target: Any, prompts: Prompts
) -> None:
    hook = own_target.layers[2].register_forward_hook(lambda *seen: float(seen[2].sum()) and None)
    runner, given = make(own_target), right_padded(prompts, "cpu")
    with pytest.raises(DraftcoreError, match="waits for the device"):
        runner.features(*given, REQUEST)
    assert runner.captured == set()
    hook.remove()
    runner.features(*given, REQUEST)
    assert runner.counts == {"replayed": 1}


class Scaling(GraphPlugin):
    """Notes its calls, and has other numbers recorded."""

    def __init__(self, factor: float, shift: float) -> None:
        self.factor, self.shift = factor, shift
        self.captured, self.replayed = list[Any](), list[Any]()

    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        self.captured.append((key.rows, key.length, batch["lengths_B"].tolist()))

        def scaled(batch: Batch, **more: Any) -> Outputs:
            return {name: x * self.factor + self.shift for name, x in work(batch, **more).items()}

        return scaled

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        live_B, lengths_B = batch["live_B"].tolist(), batch["lengths_B"].tolist()
        self.replayed.append((tuple(batch["tokens_BT"].shape), live_B, lengths_B))


def test_graph_plugins_see_every_capture_and_what_is_live_and_change_the_work(
    target: TargetModel, prompts: Prompts
) -> None:
    """The largest bucket comes first, at the first batch. Each gets the work of the one before."""
    plugins, given = [Scaling(2.0, 0.0), Scaling(1.0, 4.0)], right_padded(prompts[:3], "cpu")
    runner = make(target, plugins=plugins)
    runner.masks_differ = False  # as if the first batch had been looked at
    assert plugins[0].captured == []
    found, plain = (one.features(*given, REQUEST) for one in (runner, make(target)))
    assert all(torch.equal(found[name], value * 2 + 4) for name, value in plain.items())
    for plugin in plugins:
        assert plugin.captured[0] == (4, 32, [32, 32, 32, 32])
        assert [entry[:2] for entry in plugin.captured] == [(4, 32), (2, 32), (4, 8), (2, 8)]
        assert plugin.replayed == [((4, 32), [True, True, True, False], [5, 20, 1, 0])]


@pytest.mark.parametrize("kind", ["target", "windowed"])
@pytest.mark.parametrize("inside", [1, 3, 7])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_batch_that_is_divided_within_a_row_has_the_features_of_the_whole(
    request: pytest.FixtureRequest, kind: str, row: int, inside: int
) -> None:
    """The rest of the row attends to what the first part left of its beginning, in its window."""
    target: Any = request.getfixturevalue(kind)
    tokens_BT = torch.randint(200, (3, 8), generator=torch.Generator().manual_seed(row))
    whole, divided = static_features(target, tokens_BT, REQUEST), DividedRow(inside, 8)
    head_BT, tail_BT = tokens_BT[: row + 1].clone(), tokens_BT[row:].clone()
    head_BT[-1, inside:] = 0
    tail_BT[0] = torch.cat([tokens_BT[row, inside:], torch.zeros(inside, dtype=torch.long)])
    first = static_features(target, head_BT, REQUEST, ends=divided)
    second = static_features(target, tail_BT, REQUEST, begins=divided)
    for name, value in whole.items():
        joined = torch.cat([first[name][-1, :inside], second[name][0, : 8 - inside]])
        found = torch.cat([first[name][:row], joined[None], second[name][1:]])
        torch.testing.assert_close(found, value, rtol=0, atol=ROUNDING)


def test_a_target_that_keeps_nothing_of_a_divided_row_is_refused(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose attention knows no cache; else the rest would silently lack its beginning."""
    forward = target.decoder.forward
    monkeypatch.setattr(
        target.decoder, "forward", lambda **given: forward(**{**given, "past_key_values": None})
    )
    tokens_BT, divided = torch.ones(1, 4, dtype=torch.long), DividedRow(2, 4)
    static_features(target, tokens_BT[:, :2], REQUEST, ends=divided)
    with pytest.raises(DraftcoreError, match="leave out the graph plugin that divides rows"):
        static_features(target, tokens_BT[:, 2:], REQUEST, begins=divided)


def test_attention_is_a_break_for_backends_that_can(
    target: Any, backend: SegmentBackend, segments: Any, prompts: Prompts
) -> None:
    """One per layer; a replay has the bits of eager, and the model is left as it was."""
    runner = make(target, backend, rows=(4,), breaks=True)
    require_near(runner, target, prompts)
    assert segments.ended == len(runner.captured) * (len(target.layers) + 1)
    assert [largest_gap(runner, key) for key in runner.captured] == [0, 0]
    assert all("forward" not in vars(layer.self_attn) for layer in target.layers)
