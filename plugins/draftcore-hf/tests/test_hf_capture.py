"""Capture `hf`: the conformance suite, on one device and on two that share the target, and what is
refused when it is opened."""

from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import ALL, CaptureSuite, Open, capture_target
from draftcore_sdk.targets import tiny_target

from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError


class TestLocalCapture(CaptureSuite):
    plugin = "draftcore_hf.plugin"


class TestSharedByTwoDevices(CaptureSuite):
    """Two processes on the CPU, over gloo. transformers 5.17 wants a vocabulary that both share alike."""

    plugin = "draftcore_hf.plugin"

    @pytest.fixture(scope="class")
    @classmethod
    def target_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        pytest.importorskip("accelerate")
        return capture_target(tmp_path_factory.mktemp("shared"), vocab_size=260)

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, target_folder: Path) -> TransformersTarget:
        return TransformersTarget(str(target_folder), device="cpu", tensor_parallel=2)

    @pytest.mark.xfail(reason="only captures reach a model that devices share")
    def test_capturing_leaves_the_targets_logits_unchanged(
        self, open_capture: Open, target: TargetSpec
    ) -> None:
        super().test_capturing_leaves_the_targets_logits_unchanged(open_capture, target)

    def test_decoding_is_refused_with_a_remedy(self, target: TransformersTarget) -> None:
        with pytest.raises(UsageError, match=r"'allocate' needs it on one\n.*tensor_parallel=1"):
            target.load_model().allocate(1, 8)


def test_more_devices_than_there_are_are_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_folder, before = str(capture_target(tmp_path)), active_children()
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("draftcore_hf.target.resolve_device", torch.device)
    for device, there in (("cpu", "cores"), ("cuda:1", "devices")):
        shared: dict[str, Any] = {"device": device, "tensor_parallel": 4}
        with pytest.raises(UsageError, match=f"is 4, and from {device} on there are 3 {there}"):
            TransformersTarget(target_folder, **shared).load_model()
        shared["tensor_parallel"] = 3
        TransformersTarget(target_folder, **shared).load_model()
    assert active_children() == before


@pytest.mark.parametrize(
    ("family", "shape", "says"),
    [
        ("gpt_oss", {}, "GptOssForCausalLM has no tp_plan for its layers"),  # but for its head
        ("qwen3", {"num_key_value_heads": 1}, "1 heads of keys"),
        pytest.param("gpt2", {}, "GPT2LMHeadModel` has no `tp_plan", marks=pytest.mark.long),
    ],
)
def test_a_target_that_devices_cannot_share_is_refused_by_name(
    tmp_path: Path, family: str, shape: dict[str, Any], says: str
) -> None:
    pytest.importorskip("accelerate")
    folder = tiny_target(tmp_path, family, **shape, vocab_size=260)
    target = TransformersTarget(str(folder), device="cpu", tensor_parallel=2)
    with pytest.raises(UsageError, match=f"shared by 2 devices.*{says}") as caught:
        LocalCapture(target, ALL)
    assert "leave out target.tensor_parallel" in str(caught.value)
