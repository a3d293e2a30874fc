"""Capture through graphs: padding, refusal, slicing, moved weights, and what a graph must not do."""

from __future__ import annotations

import pytest
import torch

from draftcore.errors import DraftcoreError, UsageError
from draftcore.evaluation.decode import right_padded
from draftcore.graphs import GraphPlugin, ShapeKey
from draftcore.graphs.breaks import recording
from draftcore.graphs.prefill import EagerPrefillRunner, PrefillGraphRunner
from draftcore.graphs.recording import RecordingBackend
from draftcore.graphs.resolve import Phase
from draftcore.records import FeatureRequest
from draftcore.target import TargetModel, TargetSpec
from draftcore.testing.targets import tiny_target

REQUEST = FeatureRequest((1, 4), True, "float32")
ROUNDING = 2e-6  # fp32, another padded shape: 1.2e-6 seen at numbers of about 3 (2026-11)


def phase(**changes) -> Phase:
    given = {"rows": (2, 4), "lengths": (8, 32), "decided": {"backend": "you"}, **changes}
    return Phase("prefill", "recording", **given)


def make(target, **changes) -> PrefillGraphRunner:
    return PrefillGraphRunner(target, phase(**changes), RecordingBackend())


def require_near(found, expected, lengths_B) -> None:
    for name, value_BTH in expected.items():
        assert found[name].shape == value_BTH.shape
        for row, length in enumerate(lengths_B.tolist()):
            gap = (found[name][row, :length] - value_BTH[row, :length]).abs().max()
            assert gap <= ROUNDING, name


def test_features_are_those_of_the_eager_runner(target, prompts):
    runner, eager = make(target), EagerPrefillRunner(target)
    for batch in (prompts, prompts[2:], prompts[:1], prompts[1:3]):
        tokens_BT, lengths_B = right_padded(batch, "cpu")
        found = runner.features(tokens_BT, lengths_B, REQUEST)
        assert tuple(found) == REQUEST.names
        require_near(found, eager.features(tokens_BT, lengths_B, REQUEST), lengths_B)
    assert runner.counts == {"replayed": 4}


def test_replay_gives_the_bits_of_eager_on_the_same_padded_batch(target, prompts):
    runner = make(target)
    tokens_BT, lengths_B = right_padded(prompts, "cpu")
    found = runner.features(tokens_BT, lengths_B, REQUEST)
    padded_BT = torch.zeros(4, 32, dtype=torch.long)
    padded_BT[:, : tokens_BT.shape[1]] = tokens_BT
    eager = target.static_features(padded_BT, REQUEST)
    for name in REQUEST.names:
        assert torch.equal(found[name], eager[name][:, : tokens_BT.shape[1]])


def test_all_buckets_are_captured_at_first_use_the_largest_first(target, prompts):
    seen: list[ShapeKey] = []

    class Noting(RecordingBackend):
        def capture_one(self, key, fn):
            seen.append(key)
            super().capture_one(key, fn)

    runner = PrefillGraphRunner(target, phase(), Noting())
    assert seen == []
    for _ in range(2):
        runner.features(*right_padded(prompts[:1], "cpu"), REQUEST)
    assert [(key.rows, key.length) for key in seen] == [(4, 32), (2, 32), (4, 8), (2, 8)]


def test_a_runners_outputs_never_alias_the_next_calls(target, prompts):
    runner = make(target)
    first = runner.features(*right_padded(prompts, "cpu"), REQUEST)
    kept = {name: value.clone() for name, value in first.items()}
    runner.features(*right_padded([[9, 8, 7]] * 4, "cpu"), REQUEST)
    for name, value in kept.items():
        assert torch.equal(first[name], value), name


def test_what_no_bucket_holds_runs_eagerly_and_is_counted(target, prompts):
    runner, eager = make(target), EagerPrefillRunner(target)
    for batch in ([[1, 2]] * 5, [[3] * 33]):
        given = right_padded(batch, "cpu")
        found = runner.features(*given, REQUEST)
        for name, value in eager.features(*given, REQUEST).items():
            assert torch.equal(found[name], value)
    assert runner.counts == {"no bucket": 2}
    assert runner.captures == 0


def test_with_padding_off_only_exact_shapes_replay(target):
    runner = make(target, padding=False)
    for rows, length in ((2, 8), (2, 7), (3, 8), (4, 32)):
        runner.features(*right_padded([[5] * length] * rows, "cpu"), REQUEST)
    assert runner.counts == {"replayed": 2, "no bucket": 2}


def test_what_the_backend_refuses_runs_as_it_is(target, prompts):
    class Refusing(RecordingBackend):
        def can_run(self, batch, key):
            assert batch["lengths_B"].tolist() == [5, 20, 1, 7]
            return False

    runner = PrefillGraphRunner(target, phase(), Refusing())
    given = right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert runner.counts == {"refused": 1}


def test_requests_are_captured_apart_and_cast_to_their_type(target, prompts):
    runner, given = make(target), right_padded(prompts, "cpu")
    other = FeatureRequest((2,), False, "bfloat16")
    runner.features(*given, REQUEST)
    found = runner.features(*given, other)
    assert runner.captures == 8
    assert {name: value.dtype for name, value in found.items()} == {"hidden.2": torch.bfloat16}
    assert tuple(runner.features(*given, REQUEST)) == REQUEST.names
    assert runner.captures == 8


def test_weights_that_move_are_captured_anew_and_those_in_place_are_not(target_folder, prompts):
    target = TargetModel(TargetSpec(str(target_folder), device="cpu"))
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


def test_a_sliding_window_target_keeps_its_window(tmp_path, prompts):
    layers = ["sliding_attention", "full_attention"] * 3
    folder = tiny_target(tmp_path, layer_types=layers, use_sliding_window=True, sliding_window=8)
    target = TargetModel(TargetSpec(str(folder), device="cpu"))
    runner, given = make(target), right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert not runner.masks_differ


class TestModelsThatMakeAnotherMask:
    """Its decoder adds a mask of its own to ours, as a model that ignores ours would."""

    @pytest.fixture
    def odd(self, target_folder, monkeypatch) -> TargetModel:
        target = TargetModel(TargetSpec(str(target_folder), device="cpu"))
        masks = target._masks
        monkeypatch.setattr(target, "_masks", lambda *given: torch.zeros_like(masks(*given)))
        return target

    def test_a_locked_backend_is_refused_by_the_rule(self, odd, prompts):
        with pytest.raises(UsageError, match="the rule 'masks' refuses it"):
            make(odd).features(*right_padded(prompts, "cpu"), REQUEST)

    def test_otherwise_it_runs_eagerly_from_the_first_batch_on(self, odd, prompts):
        runner = make(odd, decided={"backend": "auto, for cpu"})
        given = right_padded(prompts, "cpu")
        for _ in range(2):
            found = runner.features(*given, REQUEST)
            eager = EagerPrefillRunner(odd).features(*given, REQUEST)
            assert all(torch.equal(found[name], eager[name]) for name in REQUEST.names)
        assert runner.counts == {"replayed": 1, "rule masks": 1}


def test_a_model_that_asks_the_host_is_refused_and_nothing_is_left(target_folder, prompts):
    target = TargetModel(TargetSpec(str(target_folder), device="cpu"))
    hook = target.layers[2].register_forward_hook(lambda *seen: float(seen[2].sum()) and None)
    runner, given = make(target), right_padded(prompts, "cpu")
    with pytest.raises(DraftcoreError, match="waits for the device"):
        runner.features(*given, REQUEST)
    assert runner.captured == set()
    hook.remove()
    runner.features(*given, REQUEST)
    assert runner.counts == {"replayed": 1}


def test_a_graph_plugin_is_told_of_every_capture_and_of_what_is_live(target, prompts):
    class Noting(GraphPlugin):
        def __init__(self):
            self.captured, self.replayed = [], []

        def on_capture(self, key, batch):
            self.captured.append((key.rows, key.length, batch["lengths_B"].tolist()))

        def on_replay(self, key, batch):
            self.replayed.append((tuple(batch["tokens_BT"].shape), batch["lengths_B"].tolist()))

    plugin = Noting()
    runner = PrefillGraphRunner(target, phase(), RecordingBackend(), [plugin])
    runner.features(*right_padded(prompts[:3], "cpu"), REQUEST)
    assert plugin.captured[0] == (4, 32, [1, 1, 1, 1])
    assert [entry[:2] for entry in plugin.captured] == [(4, 32), (2, 32), (4, 8), (2, 8)]
    assert plugin.replayed == [((4, 32), [5, 20, 1, 1])]


def test_attention_is_a_break_for_backends_that_can(target, prompts):
    """Told of breaks, a backend sees one per layer, each with its tensors among the arguments."""
    broken: list[int] = []

    class Recorder:
        def eager(self, fn, args):
            broken.append(sum(isinstance(value, torch.Tensor) for value in args))
            return fn(*args)

    class Breakable(RecordingBackend):
        def capture_one(self, key, fn):
            with recording(Recorder()):
                super().capture_one(key, fn)

    runner = PrefillGraphRunner(target, phase(rows=(4,)), Breakable(), breaks=True)
    given = right_padded(prompts, "cpu")
    found = runner.features(*given, REQUEST)
    assert len(broken) == 2 * 3 * len(target.layers)
    assert min(broken) >= 2  # hidden states and mask
    require_near(found, EagerPrefillRunner(target).features(*given, REQUEST), given[1])
    assert all("forward" not in vars(layer.self_attn) for layer in target.layers)
