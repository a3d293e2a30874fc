"""The capture `sglang`: which rows come, what it refuses, its self-tests, what it leaves behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import batch, features_of, of_the_process
from draftcore_sdk.targets import tiny_target
from draftcore_sglang import internals, selftest
from draftcore_sglang.capture import SglangCapture
from draftcore_sglang.options import SglangOptions

from draftcore.contracts.capture import BadRows, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError

pytestmark = pytest.mark.sglang

LAYERS = 4
REQUEST = FeatureRequest(tuple(range(LAYERS)), True, "float32")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 61)), [9] * 17]
Opener = Callable[..., SglangCapture]


@pytest.fixture
def target(tmp_path: Path) -> TargetSpec:
    folder = tiny_target(tmp_path, hidden_size=64, num_hidden_layers=LAYERS)
    return TransformersTarget(str(folder), device="cpu")


@pytest.fixture
def opener() -> Iterator[Opener]:
    opened: list[SglangCapture] = []

    def open_one(
        target: TargetSpec, request: FeatureRequest = REQUEST, **options: Any
    ) -> SglangCapture:
        given = SglangOptions(**{"max_tokens": 128, **options})
        opened.append(SglangCapture(target, request, given))
        return opened[-1]

    yield open_one
    for capture in opened:
        capture.close()


# ---------------------------------------------------------------- which rows


def test_layers_come_by_name_in_whatever_order_they_were_asked_for(
    target: TargetSpec, opener: Opener
) -> None:
    """sglang itself returns [2, 0] as layers 0 and 2, and a layer asked for twice once."""
    capture, asked = opener(target), batch(members=PROMPTS)
    some = features_of(opener(target, FeatureRequest((3, 0, 2, 0), False, "float32")), asked)
    for features, whole in zip(some, features_of(capture, asked), strict=True):
        for layer in (0, 2, 3):
            assert torch.equal(features[f"hidden.{layer}"], whole[f"hidden.{layer}"])


def test_a_prompt_longer_than_a_chunk_or_seen_before_comes_whole(
    target: TargetSpec, opener: Opener
) -> None:
    """Chunked prefill would give its last rows, a prefix cache the rows after what it has."""
    capture = opener(target, args={"chunked_prefill_size": 8, "disable_radix_cache": False})
    asked = batch(members=[PROMPTS[2], PROMPTS[2], PROMPTS[2][:20]])
    first, again = features_of(capture, asked), features_of(capture, asked)
    for features in (first, again):
        assert [len(one["hidden.1"]) for one in features] == [31, 31, 20]
    assert torch.equal(first[0]["hidden.1"], again[0]["hidden.1"])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"enable_dp_attention": True}, "DP attention"),
        ({"dp_size": 2}, "data parallelism"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"speculative_algorithm": "EAGLE3"}, "the target alone"),
        ({"disaggregation_mode": "prefill"}, "whole prompts"),
        ({"enable_lora": True}, "merge it into the target"),
        ({"lora_paths": ["adapter"]}, "merge it into the target"),
        ({"dtype": "bfloat16"}, "set target.dtype"),
        ({"tp_size": 2}, "set capture.options.tp"),
        ({"atention_backend": "triton"}, "did you mean 'attention_backend'"),
    ],
)
def test_arguments_that_would_change_what_is_captured_are_refused_by_name(
    target: TargetSpec, opener: Opener, args: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        opener(target, args=args)
    assert next(iter(args)) in str(caught.value)


def test_a_row_or_batch_that_is_too_long_is_named_with_the_limit(
    target: TargetSpec, opener: Opener
) -> None:
    capture = opener(target, max_tokens=32)
    with pytest.raises(BadRows, match=r"row 17 .* has 33 tokens.* takes 32") as caught:
        list(capture.features([batch(members=[[5], [7] * 33], rows=(3, 17))]))
    assert list(caught.value.reasons) == [1]
    with pytest.raises(UsageError, match=r"rows \[3, 17\] has 2 prompts\s.*with 40 tokens\s.* 32"):
        list(capture.features([batch(members=[[5] * 20, [7] * 20], rows=(3, 17))]))
    assert len(features_of(capture, batch(members=[[5] * 16, [7] * 16]))) == 2


def test_a_second_target_in_the_process_is_refused_until_the_first_is_closed(
    target: TargetSpec, opener: Opener
) -> None:
    first = opener(target)
    same = opener(target, FeatureRequest((0,), False, "float32"))
    assert same.engine is first.engine
    with pytest.raises(UsageError, match=r"128.*\n.*64"):
        opener(target, max_tokens=64)
    first.close()
    assert len(features_of(same, batch(0))) == 1, "it goes on for its other user"
    same.close()
    assert len(features_of(opener(target, max_tokens=64), batch(0))) == 1


def test_a_process_that_is_a_rank_of_a_trainer_is_refused_with_the_remedy(
    target: TargetSpec, opener: Opener, tmp_path: Path
) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"topology\.producers"):
            opener(target)
    finally:
        torch.distributed.destroy_process_group()
    assert len(features_of(opener(target), batch(0))) == 1


def test_a_device_that_this_sglang_does_not_run_on_is_refused(
    target: TargetSpec, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    with pytest.raises(UsageError, match=r"'cpu'.*'cuda'"):
        opener(target)


# ---------------------------------------------------------------- the self-tests


def test_another_layer_than_asked_for_is_found_before_anything_is_captured(
    target: TargetSpec, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a release counted layers from their inputs."""
    true = internals.Runner.layer_setter

    def shifted(runner: internals.Runner) -> Callable[[list[int]], None]:
        return lambda layers: true(runner)([max(layer - 1, 0) for layer in layers])

    monkeypatch.setattr(internals.Runner, "layer_setter", shifted)
    request = FeatureRequest((2,), True, "float32")
    with pytest.raises(UsageError, match=r"hidden\.2 .* differs from transformers'"):
        opener(target, request)
    unchecked = opener(target, request, self_test=False)
    assert len(features_of(unchecked, batch(0))) == 1


def test_a_model_that_scales_its_logits_is_refused(
    target: TargetSpec, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where transformers cannot be asked, as its model does not fit."""
    monkeypatch.setattr(selftest, "fits", lambda _: False)
    true = internals.Runner.forward

    def scaled(runner: internals.Runner, *given: Any) -> dict[str, torch.Tensor]:
        found = true(runner, *given)
        return {**found, "logits": found["logits"] * 2}

    monkeypatch.setattr(internals.Runner, "forward", scaled)
    with (
        pytest.warns(UserWarning, match="does not fit"),
        pytest.raises(UsageError, match="does not predict as its last"),
    ):
        opener(target)


# ---------------------------------------------------------------- what it leaves behind


def test_random_states_are_as_they_were_and_torch_distributed_is_free_once_it_is_closed(
    target: TargetSpec, opener: Opener
) -> None:
    """sglang seeds all of them, and training draws from them."""
    before = of_the_process()
    capture = opener(target)
    list(capture.features([batch(0, 1)]))
    assert of_the_process() == before
    assert torch.distributed.is_initialized()
    capture.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(DraftcoreError, match="no-such-format"):  # a target that it cannot load
        opener(target, self_test=False, args={"load_format": "no-such-format"})
    assert not torch.distributed.is_initialized()
    assert len(features_of(opener(target), batch(0))) == 1
