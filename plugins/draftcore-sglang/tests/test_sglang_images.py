"""The capture `sglang` of rows with images: beside transformers', which has the model's own positions."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import write_run
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.images import picture
from draftcore_sglang.capture import SglangCapture
from draftcore_sglang.options import SglangOptions
from seeing import FAMILIES, REQUEST, batch_about, opened, seeing_qwen

import draftcore
from draftcore.contracts.capture import BadRows, CaptureBatch
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang


def captured(target: TransformersTarget, asked: CaptureBatch, **options: Any) -> Sequence[Any]:
    with closing(
        SglangCapture(target, REQUEST, SglangOptions(max_tokens=512, **options))
    ) as sglang:
        (found,) = sglang.features([asked])
        return found.features


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_and_without_are_captured_as_transformers_has_them(
    tmp_path: Path, family: str
) -> None:
    """Measured in fp32: 4e-6 is the largest difference. Positions have three dimensions here."""
    target = opened(seeing_qwen(tmp_path / "target", family))
    asked = batch_about(tmp_path, target)
    (expected,) = LocalCapture(target, REQUEST).features([asked])
    for mine, theirs in zip(captured(target, asked), expected.features, strict=True):
        for name, value_TH in theirs.items():
            torch.testing.assert_close(mine[name], value_TH, rtol=0, atol=2e-5)


@pytest.fixture
def qwen(tmp_path: Path) -> TransformersTarget:
    return opened(seeing_qwen(tmp_path / "target", "qwen2_5_vl"))


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
    target = opened(folder)
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
