"""Capture through graphs: padding, refusal, slicing, moved weights, and what a graph must not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs.breaks import recording
from draftcore_graphs.divided import DividedRow
from draftcore_graphs.prefill import PrefillGraphRunner, static_features
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_sdk.replays import largest_gap
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Batch, GraphPlugin, Outputs, ShapeKey, Work
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError, UsageError
from draftcore.evaluation.decode import right_padded
from draftcore.target import EagerPrefillRunner, TransformersModel, TransformersTarget

REQUEST = FeatureRequest((1, 4), True, "float32")
ROUNDING = 2e-6  # fp32, another padded shape: 1.2e-6 seen at numbers of about 3 (2026-11)


def phase(**changes: Any) -> Phase:
    given = {"rows": (2, 4), "lengths": (8, 32), "decided": {"backend": "you"}, **changes}
    return Phase("prefill", "recording", **given)


def make(target: TargetModel, **changes: Any) -> PrefillGraphRunner:
    return PrefillGraphRunner(target, phase(**changes), RecordingBackend())


def require_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], lengths_B: Tensor
) -> None:
    for name, value_BTH in expected.items():
        assert found[name].shape == value_BTH.shape
        for row, length in enumerate(lengths_B.tolist()):
            gap = (found[name][row, :length] - value_BTH[row, :length]).abs().max()
            assert gap <= ROUNDING, name


def test_features_are_those_of_the_eager_runner(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner, eager = make(target), EagerPrefillRunner(target)
    for batch in (prompts, prompts[2:], prompts[:1], prompts[1:3]):
        tokens_BT, lengths_B = right_padded(batch, "cpu")
        found = runner.features(tokens_BT, lengths_B, REQUEST)
        assert tuple(found) == REQUEST.names
        require_near(found, eager.features(tokens_BT, lengths_B, REQUEST), lengths_B)
    assert runner.counts == {"replayed": 4}


def test_replay_gives_the_bits_of_eager_on_the_same_padded_batch(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner = make(target)
    tokens_BT, lengths_B = right_padded(prompts, "cpu")
    found = runner.features(tokens_BT, lengths_B, REQUEST)
    padded_BT = torch.zeros(4, 32, dtype=torch.long)
    padded_BT[:, : tokens_BT.shape[1]] = tokens_BT
    eager = static_features(target, padded_BT, REQUEST)
    for name in REQUEST.names:
        assert torch.equal(found[name], eager[name][:, : tokens_BT.shape[1]])


def test_every_bucket_replays_to_the_bits_of_eager(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner = make(target)
    for batch in (prompts, prompts[:2], prompts[2:], [prompts[0]] * 4):
        runner.features(*right_padded(batch, "cpu"), REQUEST)
    assert len(runner.captured) == 4
    for key in sorted(runner.captured):
        assert largest_gap(runner, key) == 0, key


def test_every_buffer_is_filled_anew_for_every_batch(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    """A slot that was left out of a filling would go on with the values of another batch."""
    runner, given = make(target), right_padded(prompts, "cpu")
    right = runner.features(*given, REQUEST)
    for storage in runner.buffers.storage.values():
        storage.fill_(77)
    found = runner.features(*given, REQUEST)
    assert all(torch.equal(found[name], value) for name, value in right.items())
    tokens_BT, lengths_B = given
    batch = runner.buffers.view(ShapeKey(4, 32))
    assert torch.equal(batch["tokens_BT"][:, :20], tokens_BT)
    assert batch["tokens_BT"][:, 20:].eq(0).all()
    assert torch.equal(batch["lengths_B"], lengths_B)
    assert batch["live_B"].all()


def test_all_buckets_are_captured_at_first_use_the_largest_first(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    seen: list[ShapeKey] = []

    class Noting(RecordingBackend):
        def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
            seen.append(key)
            super().capture_one(key, fn)

    runner = PrefillGraphRunner(target, phase(), Noting())
    assert seen == []
    for _ in range(2):
        runner.features(*right_padded(prompts[:1], "cpu"), REQUEST)
    assert [(key.rows, key.length) for key in seen] == [(4, 32), (2, 32), (4, 8), (2, 8)]


def test_a_runners_outputs_never_alias_the_next_calls(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner = make(target)
    first = runner.features(*right_padded(prompts, "cpu"), REQUEST)
    kept = {name: value.clone() for name, value in first.items()}
    runner.features(*right_padded([[9, 8, 7]] * 4, "cpu"), REQUEST)
    for name, value in kept.items():
        assert torch.equal(first[name], value), name


def test_what_no_bucket_holds_runs_eagerly_and_is_counted(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner, eager = make(target), EagerPrefillRunner(target)
    for batch in ([[1, 2]] * 5, [[3] * 33]):
        given = right_padded(batch, "cpu")
        found = runner.features(*given, REQUEST)
        for name, value in eager.features(*given, REQUEST).items():
            assert torch.equal(found[name], value)
    assert runner.counts == {"no bucket": 2}
    assert runner.captures == 0


def test_with_padding_off_only_exact_shapes_replay(target: TargetModel) -> None:
    runner = make(target, padding=False)
    for rows, length in ((2, 8), (2, 7), (3, 8), (4, 32)):
        runner.features(*right_padded([[5] * length] * rows, "cpu"), REQUEST)
    assert runner.counts == {"replayed": 2, "no bucket": 2}


def test_what_the_backend_refuses_runs_as_it_is(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    class Refusing(RecordingBackend):
        def can_run(self, batch: Batch, key: ShapeKey) -> bool:
            assert batch["lengths_B"].tolist() == [5, 20, 1, 7]
            return False

    runner = PrefillGraphRunner(target, phase(), Refusing())
    given = right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert runner.counts == {"refused": 1}


def test_requests_are_captured_apart_and_cast_to_their_type(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    runner, given = make(target), right_padded(prompts, "cpu")
    other = FeatureRequest((2,), False, "bfloat16")
    runner.features(*given, REQUEST)
    found = runner.features(*given, other)
    assert runner.captures == 8
    assert {name: value.dtype for name, value in found.items()} == {"hidden.2": torch.bfloat16}
    assert tuple(runner.features(*given, REQUEST)) == REQUEST.names
    assert runner.captures == 8


def test_weights_that_move_are_captured_anew_and_those_in_place_are_not(
    target_folder: Path, prompts: list[list[int]]
) -> None:
    target = TransformersModel(TransformersTarget(str(target_folder), device="cpu"))
    runner, given = make(target), right_padded(prompts, "cpu")
    runner.features(*given, REQUEST)
    weight = target.layers[0].mlp.up_proj.weight
    weight.data.mul_(1.5)
    found = runner.features(*given, REQUEST)
    assert runner.captures == 4
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    weight.data = weight.data * 0.5
    found = runner.features(*given, REQUEST)
    assert runner.captures == 8
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])


def test_a_sliding_window_target_keeps_its_window(tmp_path: Path, prompts: list[list[int]]) -> None:
    layers = ["sliding_attention", "full_attention"] * 3
    folder = tiny_target(tmp_path, layer_types=layers, use_sliding_window=True, sliding_window=8)
    target = TransformersModel(TransformersTarget(str(folder), device="cpu"))
    runner, given = make(target), right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert not runner.masks_differ


class TestModelsThatMakeAnotherMask:
    """Its decoder adds a mask of its own to ours, as a model that ignores ours would."""

    @pytest.fixture
    def odd(self, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
        target = TransformersModel(TransformersTarget(str(target_folder), device="cpu"))
        masks = target.masks
        monkeypatch.setattr(target, "masks", lambda *given: torch.zeros_like(masks(*given)))
        return target

    def test_a_locked_backend_is_refused_by_the_rule(
        self, odd: TargetModel, prompts: list[list[int]]
    ) -> None:
        with pytest.raises(UsageError, match="the rule 'masks' refuses it"):
            make(odd).features(*right_padded(prompts, "cpu"), REQUEST)

    def test_otherwise_it_runs_eagerly_from_the_first_batch_on(
        self, odd: TargetModel, prompts: list[list[int]]
    ) -> None:
        runner = make(odd, decided={"backend": "auto, for cpu"})
        given = right_padded(prompts, "cpu")
        for _ in range(2):
            found = runner.features(*given, REQUEST)
            eager = EagerPrefillRunner(odd).features(*given, REQUEST)
            assert all(torch.equal(found[name], eager[name]) for name in REQUEST.names)
        assert runner.counts == {"replayed": 1, "rule masks": 1}


def test_a_model_that_asks_the_host_is_refused_and_nothing_is_left(
    target_folder: Path, prompts: list[list[int]]
) -> None:
    target = TransformersModel(TransformersTarget(str(target_folder), device="cpu"))
    hook = target.layers[2].register_forward_hook(lambda *seen: float(seen[2].sum()) and None)
    runner, given = make(target), right_padded(prompts, "cpu")
    with pytest.raises(DraftcoreError, match="waits for the device"):
        runner.features(*given, REQUEST)
    assert runner.captured == set()
    hook.remove()
    runner.features(*given, REQUEST)
    assert runner.counts == {"replayed": 1}


class Noting(GraphPlugin):
    """Notes its calls."""

    def __init__(self) -> None:
        self.captured, self.replayed = [], []

    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        self.captured.append((key.rows, key.length, batch["lengths_B"].tolist()))
        return work

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        live_B, lengths_B = batch["live_B"].tolist(), batch["lengths_B"].tolist()
        self.replayed.append((tuple(batch["tokens_BT"].shape), live_B, lengths_B))


def test_a_graph_plugin_is_told_of_every_capture_and_of_what_is_live(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    plugin = Noting()
    runner = PrefillGraphRunner(target, phase(), RecordingBackend(), [plugin])
    runner.features(*right_padded(prompts[:3], "cpu"), REQUEST)
    assert plugin.captured[0] == (4, 32, [32, 32, 32, 32])
    assert [entry[:2] for entry in plugin.captured] == [(4, 32), (2, 32), (4, 8), (2, 8)]
    assert plugin.replayed == [((4, 32), [True, True, True, False], [5, 20, 1, 0])]


def test_what_a_graph_plugin_makes_of_the_work_is_what_is_recorded(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    """Each gets the work of the one before it."""

    class Scaling(Noting):
        def __init__(self, factor: float, shift: float) -> None:
            super().__init__()
            self.factor, self.shift = factor, shift

        def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
            def scaled(part: Batch, **divided: Any) -> Outputs:
                whole = work(part, **divided)
                return {name: x * self.factor + self.shift for name, x in whole.items()}

            return scaled

    plain, given = make(target), right_padded(prompts, "cpu")
    right = plain.features(*given, REQUEST)
    lenient = phase(decided={"backend": "auto"})
    plugins = [Scaling(2.0, 0.0), Scaling(1.0, 4.0)]
    runner = PrefillGraphRunner(target, lenient, RecordingBackend(), plugins)
    runner.masks_differ = False  # as if the first batch had been looked at
    found = runner.features(*given, REQUEST)
    for name, value in right.items():
        assert torch.equal(found[name], value * 2 + 4)


@pytest.mark.parametrize("inside", [1, 3, 7])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_batch_that_is_divided_within_a_row_has_the_features_of_the_whole(
    target: TargetModel, row: int, inside: int
) -> None:
    """The rest of the row attends to what the first part left of its beginning."""
    tokens_BT = torch.randint(200, (3, 8), generator=torch.Generator().manual_seed(row))
    whole = static_features(target, tokens_BT, REQUEST)
    divided = DividedRow(inside, 8)
    head_BT, tail_BT = tokens_BT[: row + 1].clone(), tokens_BT[row:].clone()
    head_BT[-1, inside:] = 0
    tail_BT[0] = torch.cat([tokens_BT[row, inside:], torch.zeros(inside, dtype=torch.long)])
    first = static_features(target, head_BT, REQUEST, ends=divided)
    second = static_features(target, tail_BT, REQUEST, begins=divided)
    for name, value in whole.items():
        beginning, rest = first[name][-1, :inside], second[name][0, : 8 - inside]
        torch.testing.assert_close(torch.cat([beginning, rest]), value[row], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(first[name][:row], value[:row], rtol=0, atol=ROUNDING)
        torch.testing.assert_close(second[name][1:], value[row + 1 :], rtol=0, atol=ROUNDING)


def test_a_target_that_keeps_nothing_of_a_divided_row_is_refused(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
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


def test_a_row_is_divided_within_its_window(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"] * 3
    folder = tiny_target(tmp_path, layer_types=layers, use_sliding_window=True, sliding_window=3)
    target = TransformersModel(TransformersTarget(str(folder), device="cpu"))
    divided = DividedRow(4, 8)
    tokens_BT = torch.randint(200, (1, 8), generator=torch.Generator().manual_seed(0))
    whole = static_features(target, tokens_BT, REQUEST)
    parts = [
        static_features(target, tokens_BT[:, :4], REQUEST, ends=divided),
        static_features(target, tokens_BT[:, 4:], REQUEST, begins=divided),
    ]
    for name, value in whole.items():
        found = torch.cat([part[name] for part in parts], dim=1)
        torch.testing.assert_close(found, value, rtol=0, atol=ROUNDING)


def test_attention_is_a_break_for_backends_that_can(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    """Such a backend sees one break per layer, each with its tensors among the arguments."""
    broken: list[int] = []

    class Recorder:
        def eager(self, fn: Callable[..., Outputs], args: tuple[Any, ...]) -> Outputs:
            broken.append(sum(isinstance(value, torch.Tensor) for value in args))
            return fn(*args)

    class Breakable(RecordingBackend):
        def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
            with recording(Recorder()):
                super().capture_one(key, fn)

    runner = PrefillGraphRunner(target, phase(rows=(4,)), Breakable(), breaks=True)
    given = right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    assert len(broken) == 2 * 3 * len(target.layers)
    assert min(broken) >= 2  # hidden states and mask
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert all("forward" not in vars(layer.self_attn) for layer in target.layers)
