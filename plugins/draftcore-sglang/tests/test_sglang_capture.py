"""The capture `sglang`: the standard tests, its rows, refusals and self-tests, and what it leaves."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from capturing import (
    FAMILIES,
    REQUEST,
    SAMPLES,
    batch_about,
    losses,
    require_engine_ended,
    seeing_qwen,
    target_that_sees,
    write_run,
)
from draftcore_eval import selftest
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import REQUESTS, CaptureSuite, batch, capture_target, features_of
from draftcore_sdk.images import picture
from draftcore_sdk.memory import of_the_process
from draftcore_sdk.suite import opened
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.capture import SglangCapture
from draftcore_sglang.internals import Runner
from draftcore_sglang.options import SglangOptions

import draftcore
from draftcore.contracts.capture import BadRows, CaptureBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError

pytestmark = pytest.mark.sglang

EVERY = REQUESTS["every layer"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 61)), [9] * 17]
Opener = Callable[..., SglangCapture]


@pytest.mark.smoke
class TestSglang(CaptureSuite):
    """One engine serves all of them: a capture that stays open holds the target."""

    plugin, name, options = "draftcore_sglang.plugin", "sglang", {"max_tokens": 1024}
    limit = 600  # an engine starts

    @pytest.fixture(scope="class")
    @classmethod
    def target_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        written = capture_target(tmp_path_factory.mktemp("target"), "qwen3")
        target = TransformersTarget(str(written), device="cpu")
        asked = {"target": target, "request": REQUESTS["both"]}
        with closing(opened(cls.plugin, "capture", cls.name, cls.options, **asked)):
            yield written


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Open captures of a target of 4 layers, or of another."""
    folder = tiny_target(tmp_path / "tiny", hidden_size=64, num_hidden_layers=4)
    tiny, opened = TransformersTarget(str(folder), device="cpu"), list[SglangCapture]()

    def open_one(
        request: FeatureRequest = EVERY, target: TargetSpec = tiny, **options: Any
    ) -> SglangCapture:
        given = SglangOptions(**{"max_tokens": 128, **options})
        opened.append(SglangCapture(target, request, given))
        return opened[-1]

    yield open_one
    for capture in opened:
        capture.close()


# ---------------------------------------------------------------- which rows


def test_layers_come_by_name_in_whatever_order_they_were_asked_for(opener: Opener) -> None:
    """sglang itself returns [2, 0] as layers 0 and 2, and a layer asked for twice once."""
    capture, asked = opener(), batch(members=PROMPTS)
    some = features_of(opener(FeatureRequest((3, 0, 2, 0), False, "float32")), asked)
    for features, whole in zip(some, features_of(capture, asked), strict=True):
        for layer in (0, 2, 3):
            assert torch.equal(features[f"hidden.{layer}"], whole[f"hidden.{layer}"])


def test_a_prompt_longer_than_a_chunk_or_seen_before_comes_whole(opener: Opener) -> None:
    """Chunked prefill would give its last rows, a prefix cache the rows after what it has."""
    capture = opener(args={"chunked_prefill_size": 8, "disable_radix_cache": False})
    asked = batch(members=[PROMPTS[2], PROMPTS[2], PROMPTS[2][:20]])
    first, again = features_of(capture, asked), features_of(capture, asked)
    for features in (first, again):
        assert [len(one["hidden.1"]) for one in features] == [31, 31, 20]
    assert torch.equal(first[0]["hidden.1"], again[0]["hidden.1"])


# Measured on a CPU: no difference, as both then add in the same order; longer rows differ by 2e-6.
RTOL = 1e-5


@pytest.mark.smoke
def test_a_draft_trains_on_what_sglang_captures_as_on_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: target in sglang, held-out samples, decoding by transformers, checkpoints."""
    prompts, true = 0, Runner.forward

    def counted(runner: Runner, given: Sequence[Sequence[int]], *others: Any) -> Any:
        nonlocal prompts
        prompts += len(given)
        return true(runner, given, *others)

    def trained(name: str, **options: Any) -> list[float]:
        capture, often = {"name": name, "options": options}, {"eval_every": 6, "eval_prompts": 2}
        draftcore.train(file := write_run(tmp_path / name, target, capture=capture, train=often))
        return losses(file)

    monkeypatch.setattr(Runner, "forward", counted)
    target = tiny_target(tmp_path / "target")
    theirs = trained("hf")
    assert prompts == 0
    ours = trained("sglang", max_tokens=1024)
    assert prompts >= SAMPLES + 3, "every training and held-out sample, and self-tests"
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=RTOL)


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
    opener: Opener, args: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        opener(args=args)
    assert next(iter(args)) in str(caught.value)


def test_a_row_or_batch_that_is_too_long_is_named_with_the_limit(opener: Opener) -> None:
    capture = opener(max_tokens=32)
    with pytest.raises(BadRows, match=r"row 17 .* has 33 tokens.* takes 32") as caught:
        list(capture.features([batch(members=[[5], [7] * 33], rows=(3, 17))]))
    assert list(caught.value.reasons) == [1]
    with pytest.raises(UsageError, match=r"rows \[3, 17\] has 2 prompts\s.*with 40 tokens\s.* 32"):
        list(capture.features([batch(members=[[5] * 20, [7] * 20], rows=(3, 17))]))
    assert len(features_of(capture, batch(members=[[5] * 16, [7] * 16]))) == 2


def test_a_second_target_in_the_process_is_refused_until_the_first_is_closed(
    opener: Opener,
) -> None:
    first = opener()
    same = opener(FeatureRequest((0,), False, "float32"))
    assert same.engine is first.engine
    with pytest.raises(UsageError, match=r"128.*\n.*64"):
        opener(max_tokens=64)
    first.close()
    assert len(features_of(same, batch(0))) == 1, "it goes on for its other user"
    same.close()
    assert len(features_of(opener(max_tokens=64), batch(0))) == 1


def test_a_process_that_is_a_rank_or_a_device_that_this_sglang_does_not_run_on_is_refused(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.platforms import current_platform

    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"topology\.producers"):
            opener()
    finally:
        torch.distributed.destroy_process_group()
    with monkeypatch.context() as other:
        other.setattr(type(current_platform), "device_type", "cuda")
        with pytest.raises(UsageError, match=r"'cpu'.*'cuda'"):
            opener()
    assert len(features_of(opener(), batch(0))) == 1


def test_another_layer_than_asked_for_is_found_before_anything_is_captured(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a release counted layers from their inputs."""
    true = Runner.layer_setter

    def shifted(runner: Runner) -> Callable[[list[int]], None]:
        return lambda layers: true(runner)([max(layer - 1, 0) for layer in layers])

    monkeypatch.setattr(Runner, "layer_setter", shifted)
    request = FeatureRequest((2,), True, "float32")
    with pytest.raises(UsageError, match=r"hidden\.2 .* differs from transformers'"):
        opener(request)
    unchecked = opener(request, self_test=False)
    assert len(features_of(unchecked, batch(0))) == 1


def test_a_model_that_scales_its_logits_is_refused(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where transformers cannot be asked, as its model does not fit."""
    monkeypatch.setattr(selftest, "fits", lambda _: False)
    true = Runner.forward

    def scaled(runner: Runner, *given: Any) -> dict[str, torch.Tensor]:
        found = true(runner, *given)
        return {**found, "logits": found["logits"] * 2}

    monkeypatch.setattr(Runner, "forward", scaled)
    with (
        pytest.warns(UserWarning, match="does not fit"),
        pytest.raises(UsageError, match="does not predict as its last"),
    ):
        opener()


def test_random_states_are_as_they_were_and_torch_distributed_is_free_once_it_is_closed(
    opener: Opener,
) -> None:
    """sglang seeds all of them, and training draws from them."""
    before = of_the_process()
    capture = opener()
    list(capture.features([batch(0, 1)]))
    assert of_the_process() == before
    assert torch.distributed.is_initialized()
    capture.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(DraftcoreError, match="no-such-format"):  # a target that it cannot load
        opener(self_test=False, args={"load_format": "no-such-format"})
    assert not torch.distributed.is_initialized()
    assert len(features_of(opener(), batch(0))) == 1


# ---------------------------------------------------------------- on two ranks


def shared_target(folder: Path, dtype: str, device: str) -> TargetSpec:
    # Heads that two ranks can share, of a width that CUDA attention has kernels for.
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    tiny_target(folder, hidden_size=64, num_hidden_layers=4, **shape)
    return TransformersTarget(str(folder), dtype=dtype, device=device)


def largest_gap(found: Sequence[Mapping[str, torch.Tensor]], target: TargetSpec) -> float:
    """Between both captures, relative to the largest number of each feature."""
    (expected,) = LocalCapture(target, EVERY).features([batch(members=PROMPTS)])
    gaps = [
        float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max())
        for mine, theirs in zip(found, expected.features, strict=True)
        for name in EVERY.names
    ]
    return max(gaps)


def test_two_ranks_capture_what_transformers_does_until_one_dies(
    tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # sglang binds a rank to the cores of a NUMA node, or to those named here; and with ranks it
    # compiles the embedding, which without a kernel for it takes minutes on a CPU.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    psutil = pytest.importorskip("psutil")  # which sglang requires
    target, asked = shared_target(tmp_path, "float32", "cpu"), batch(members=PROMPTS)
    capture = opener(target=target, tp=2)
    assert largest_gap(features_of(capture, asked), target) < 1e-5
    ranks = [psutil.Process(rank.pid) for rank in active_children()]
    links = [link for rank in ranks for link in rank.net_connections()]
    assert {link.laddr.ip for link in links if link.status == "LISTEN"} == {"127.0.0.1"}
    assert not torch.distributed.is_initialized(), "no rank lives in this process"
    require_engine_ended(lambda: features_of(capture, asked))


def test_a_rank_that_cannot_start_ends_all_with_its_reason(
    tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0")
    with pytest.raises(DraftcoreError, match=r"rank \d .* failed[\s\S]*all ranks were ended"):
        opener(target=shared_target(tmp_path, "float32", "cpu"), tp=2)


@pytest.mark.gpu
@pytest.mark.parametrize("tp", [1, 2])
def test_features_on_cuda_are_those_of_transformers_and_stay_on_the_device(
    tmp_path: Path, opener: Opener, tp: int
) -> None:
    """bf16, in which 1.4e-2 of the largest number was measured on an H200."""
    if torch.cuda.device_count() < tp:
        pytest.skip("needs two CUDA devices")
    target = shared_target(tmp_path, "bfloat16", "cuda")
    # The attention that every build of the kernels has.
    capture = opener(target=target, tp=tp, args={"attention_backend": "triton"})
    found = features_of(capture, batch(members=PROMPTS))
    assert largest_gap(found, target) < 3e-2
    assert {value.device.type for row in found for value in row.values()} == {"cuda"}
    capture.close()
    assert not torch.distributed.is_initialized()


# ---------------------------------------------------------------- rows with images


def captured(
    target: TargetSpec, asked: CaptureBatch, **options: Any
) -> Sequence[Mapping[str, torch.Tensor]]:
    given = SglangOptions(max_tokens=512, **options)
    with closing(SglangCapture(target, REQUEST, given)) as sglang:
        return features_of(sglang, asked)


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_and_without_are_captured_as_transformers_has_them(
    tmp_path: Path, family: str
) -> None:
    """Measured in fp32: 4e-6 is the largest difference. Positions have three dimensions here."""
    target = target_that_sees(seeing_qwen(tmp_path / "target", family))
    asked = batch_about(tmp_path, target)
    (expected,) = LocalCapture(target, REQUEST).features([asked])
    for mine, theirs in zip(captured(target, asked), expected.features, strict=True):
        for name, value_TH in theirs.items():
            torch.testing.assert_close(mine[name], value_TH, rtol=0, atol=2e-5)


@pytest.fixture
def qwen(tmp_path: Path) -> TransformersTarget:
    return target_that_sees(seeing_qwen(tmp_path / "target", "qwen2_5_vl"))


def test_a_run_takes_rows_with_images_by_sglang(tmp_path: Path, qwen: TransformersTarget) -> None:
    asked = [{"type": "image", "image": str(picture(tmp_path / "a.png", 0))}], "just text"
    answer = {"role": "assistant", "content": "it is so"}
    talks = [[{"role": "user", "content": content}, answer] for content in asked]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    options = {"name": "sglang", "options": {"max_tokens": 512}}
    data, store = {"train": str(train)}, f"file:{tmp_path / 'features'}"
    file = write_run(tmp_path / "run", Path(qwen.path), capture=options, data=data, store=store)
    assert "captured 2 samples" in draftcore.capture(file)


def test_a_target_that_sglang_sees_otherwise_is_refused_at_its_first_row_with_images(
    tmp_path: Path,
) -> None:
    """Without this word in its config sglang orders the dimensions of positions otherwise."""
    folder = seeing_qwen(tmp_path / "target", "qwen3_vl", mrope_interleaved=False)
    target = target_that_sees(folder)
    asked = batch_about(tmp_path, target)
    text = CaptureBatch(0, asked.rows[1:2], asked.ids[1:2], asked.token_ids[1:2])
    assert len(captured(target, text)) == 1
    with pytest.raises(UsageError, match=r"hidden\.0 of a row with images of .* differs"):
        captured(target, asked)
    assert len(captured(target, asked, self_test=False)) == 3


def test_a_family_that_sglang_gives_no_images_is_refused_by_name(
    tmp_path: Path, qwen: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers import multimodal_processor

    monkeypatch.setattr(multimodal_processor, "import_processors", lambda _: None)
    monkeypatch.setattr(multimodal_processor, "PROCESSOR_MAPPING", {})
    with pytest.raises(UsageError, match=r"cannot give Qwen2_5_VL.* images(.|\n)*capture\.name=hf"):
        captured(qwen, batch_about(tmp_path, qwen))


def test_an_image_that_was_changed_or_is_gone_leaves_its_row_out(
    tmp_path: Path, qwen: TransformersTarget
) -> None:
    asked = batch_about(tmp_path, qwen)
    (tmp_path / "0.png").write_bytes((tmp_path / "1.png").read_bytes())
    (tmp_path / "turned.jpg").unlink()
    with pytest.raises(BadRows, match=r"row 4: .*was changed.*0\.png\n.*row 9: .*turned") as caught:
        captured(qwen, asked)
    assert list(caught.value.reasons) == [0, 2]
