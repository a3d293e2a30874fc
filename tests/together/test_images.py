"""Rows with images: from conversations to features of a target that sees, and to a draft."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from draftcore_data.conversations import BadRow
from draftcore_data.dataset import Dataset, build_dataset
from draftcore_data.images import OwnProcessor
from draftcore_data.options import DataOptions
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.images import PAD, WRITTEN, picture, seeing_target
from transformers import AutoModelForImageTextToText, AutoProcessor, __version__
from transformers.utils import is_torchvision_available

from draftcore.contracts.capture import BadRows, FeatureRequest
from draftcore.data.samples import batch_of
from tests.together.conftest import NewProject, Project

blind = __version__.startswith("5.17.") and not is_torchvision_available()
pytestmark = pytest.mark.skipif(blind, reason="transformers 5.17 sees nothing without torchvision")
ANSWERS = ["it is thing 0", "it is thing 1", "thing 2", "that is 3", "nothing"]
TEXT = "no image\n"  # text parts are joined by newlines
CAPTURES = """
from pathlib import Path
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

@hookimpl
def describe():
    return [Offer("capture", "blind"), Offer("capture", "late", frozenset({"images"}))]

class Late:
    def features(self, batches):
        for batch in batches:
            Path(__file__).with_suffix(".txt").write_text(str(batch.rows))
            raise UsageError("this family's images are beyond it")
    def close(self):
        Path(__file__).with_suffix(".closed").touch()

@hookimpl
def capture(name, target, request, options):
    assert name == "late", "it is refused before it is opened"
    return Late()
"""


def asking(image: object, answer: str) -> dict[str, Any]:
    """A row that asks about an image, and something else before that."""
    question = [image, {"type": "text", "text": "what is this?"}]
    contents = ["hello", "hi there", question, answer]
    roles = ["user", "assistant"] * 2
    pairs = zip(roles, contents, strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def rows_about(folder: Path) -> list[dict[str, Any]]:
    """Rows about images, named in each shape that people name them in, and one without any."""
    files = [picture(folder / f"{at}.png", at, 56 + 28 * (at % 3)) for at in range(4)]
    data = base64.b64encode(files[0].read_bytes()).decode()
    parts: list[object] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image", "image": "1.png"},
        {"type": "image_url", "image_url": f"file://{files[2]}"},
        {"type": "image", "path": str(files[3])},
    ]
    parts.append({"type": "text", "text": TEXT.strip()})
    return [asking(part, answer) for part, answer in zip(parts, ANSWERS, strict=True)]


def project_of(make: NewProject, folder: Path, family: str, **changes: Any) -> Project:
    target = seeing_target(folder / "target", family)
    project = make(folder, target, **{"train": {"batch": 3, "epochs": 1}, **changes})
    lines = "".join(json.dumps(row) + "\n" for row in rows_about(folder))
    (folder / "train.jsonl").write_text(lines)
    return project


def dataset_of(folder: Path, target: TransformersTarget, **options: Any) -> Dataset:
    given = str(folder / "train.jsonl"), target.load_tokenizer(), DataOptions(**options)
    return build_dataset(*given, folder / "data", processor=target.images)


def opened(folder: Path, devices: int = 1) -> TransformersTarget:
    """Open a target that sees, as a run does."""
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "tensor_parallel": devices}
    target = TransformersTarget(str(folder), **given)
    target.images = OwnProcessor(target.path, target.source)
    return target


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "gemma3"])
def sees(request: pytest.FixtureRequest, tmp_path: Path) -> TransformersTarget:
    """A target that sees, beside train.jsonl with rows about images."""
    lines = "".join(json.dumps(row) + "\n" for row in rows_about(tmp_path))
    (tmp_path / "train.jsonl").write_text(lines)
    return opened(seeing_target(tmp_path / "target", request.param))


def test_a_draft_trains_on_rows_with_images_that_this_process_sees_or_another(
    tmp_path: Path, make_project: NewProject
) -> None:
    project = project_of(make_project, tmp_path, "qwen2_5_vl")
    assert "captured 5 samples" in project.cli("capture").output
    there = ("store=auto", "topology.producers=1", f"run={tmp_path / 'there'}")
    assert "complete: step 2 of 2" in project.finish("train", *there)
    for file in tmp_path.glob("*.png"):
        file.unlink()  # features are all that training needs
    assert "complete: step 2 of 2" in project.cli("train", "data.train=null").output
    assert project.losses() == project.losses("../there")
    project.cli("export")
    assert (project.run / "export" / "model.safetensors").exists()


def test_features_are_the_models_own(tmp_path: Path, sees: TransformersTarget) -> None:
    """Of layers they are what the next is given, as servers capture: with Qwen3-VL's deep stack."""
    dataset, request = dataset_of(tmp_path, sees), FeatureRequest((0, 2), True, "float32", 0, True)
    batch = batch_of(0, (0, 1, 4), dataset)
    capture, prompt = LocalCapture(sees, request), [dataset.tokens(4)[:30].tolist()]
    text_alone = sees.load_model().generate(prompt, 8)
    (captured,) = capture.features([batch])
    assert sees.load_model().generate(prompt, 8) == text_alone, "images leave no positions behind"
    own = AutoModelForImageTextToText.from_pretrained(sees.path, dtype=torch.float32).eval()
    processor, given = AutoProcessor.from_pretrained(sees.path), dict[int, torch.Tensor]()
    for at, layer in enumerate(own.get_decoder().layers):

        def keep(_: Any, args: tuple[Any, ...], at: int = at) -> None:
            given[at] = args[0]

        layer.register_forward_pre_hook(keep)
    image = WRITTEN.get(sees.config.model_type, PAD)
    for row, features in zip(batch.rows, captured.features, strict=True):
        pictures = [PIL.Image.open(tmp_path / f"{row}.png")] if row != 4 else None
        text = (
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi there<|im_end|>\n"
            f"<|im_start|>user\n{image if pictures else TEXT}what is this?<|im_end|>\n"
            f"<|im_start|>assistant\n{ANSWERS[row]}<|im_end|>\n"
        )
        inputs = processor(text=[text], images=pictures, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == dataset.tokens(row).tolist()
        with torch.no_grad():
            states = own(**inputs, output_hidden_states=True).hidden_states
        expected = {"hidden.0": given[1], "hidden.2": given[3], "embeddings": given[0]}
        for name, value_1TH in {**expected, "last_hidden": states[-1]}.items():
            torch.testing.assert_close(features[name], value_1TH[0], rtol=0, atol=1e-5)
        stacked = bool(pictures) and sees.config.model_type == "qwen3_vl"
        assert torch.allclose(given[1], states[1], atol=1e-5) is not stacked


def test_answers_alone_are_learned_and_several_images_stand_where_the_questions_have_them(
    tmp_path: Path, sees: TransformersTarget
) -> None:
    """Each has as many tokens as alone, and what is learned is the same."""
    single = dataset_of(tmp_path, sees)
    assert [len(single.images(row)) for row in range(5)] == [1, 1, 1, 1, 0]
    for row, thing in enumerate(ANSWERS):
        learned = single.tokens(row)[single.loss_mask(row)].tolist()
        assert sees.load_tokenizer().decode(learned) == f"hi there<|im_end|>{thing}<|im_end|>"
    talks = [row["messages"] for row in rows_about(tmp_path)[1:3]]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [*talks[0], *talks[1]]}) + "\n")
    both = dataset_of(tmp_path, sees)
    assert both.images(0) == (*single.images(1), *single.images(2))
    for column in (Dataset.tokens, Dataset.loss_mask):
        apart = np.concatenate([column(single, 1), column(single, 2)])
        assert column(both, 0).tolist() == apart.tolist()
    batch = batch_of(0, (0,), both)
    (captured,) = LocalCapture(sees, FeatureRequest((0,), True, "float32")).features([batch])
    assert len(captured.features[0]["last_hidden"]) == both.lengths[0]


@pytest.fixture
def qwen(tmp_path: Path) -> TransformersTarget:
    """A target that sees, beside a row about an image and one of text."""
    rows = (rows_about(tmp_path)[1], asking("just text", "fine" * 30))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return opened(seeing_target(tmp_path / "target", "qwen2_5_vl"))


def test_an_image_that_changes_is_another_row_and_one_that_is_gone_or_too_long_is_none(
    tmp_path: Path, qwen: TransformersTarget
) -> None:
    """Until it is there again; and it is never cut."""
    before, image = dataset_of(tmp_path, qwen), tmp_path / "1.png"
    assert dataset_of(tmp_path, qwen).feature_ids == before.feature_ids
    picture(image, 99, 84)
    after = dataset_of(tmp_path, qwen)
    assert after.tokens(0).tolist() == before.tokens(0).tolist()
    assert after.feature_ids[0] != before.feature_ids[0]
    old = batch_of(0, (0,), before)
    capture = LocalCapture(qwen, FeatureRequest((0,), True, "float32"))
    with pytest.raises(BadRows, match=r"was changed since its row was rendered: .*1\.png"):
        next(capture.features([old]))
    image.rename(tmp_path / "away")
    gone = dataset_of(tmp_path, qwen)
    bad = BadRow("train.jsonl:1", "an image cannot be read", str(image))
    assert (gone.report.kept, gone.report.skipped) == (1, [bad])
    (tmp_path / "away").rename(image)
    assert dataset_of(tmp_path, qwen).report.kept == 2
    short = dataset_of(tmp_path, qwen, max_length=80, overlong="truncate")
    assert (short.report.kept, short.report.truncated) == (1, 1)
    (bad,) = short.report.skipped
    assert str(bad).startswith("train.jsonl:1: longer than 80 tokens")


def test_devices_that_share_a_target_see_what_one_does(
    tmp_path: Path, qwen: TransformersTarget
) -> None:
    pytest.importorskip("accelerate")
    dataset, request = dataset_of(tmp_path, qwen), FeatureRequest((0, 2), True, "float32")
    batch = batch_of(0, (0,), dataset)
    (wanted,) = LocalCapture(qwen, request).features([batch])
    shared = opened(Path(qwen.path), devices=2)
    (found,) = LocalCapture(shared, request).features([batch])
    torch.testing.assert_close(found.features, wanted.features, rtol=0, atol=1e-4)


def test_a_target_of_text_and_one_without_processor_leave_images_out_and_say_so(
    tmp_path: Path, qwen: TransformersTarget
) -> None:
    for gone, processor in (("", None), ("processor_config.json", qwen.images)):
        (tmp_path / "target" / gone).unlink() if gone else None
        given = str(tmp_path / "train.jsonl"), qwen.load_tokenizer(), DataOptions()
        dataset = build_dataset(*given, tmp_path / f"data{gone}", processor=processor)
        said = (
            "images need the target's processor, which cannot be loaded: " if gone else "text alone"
        )
        assert said in dataset.report.text()


def test_a_capture_that_reads_text_alone_or_sees_too_little_is_refused_before_any_batch(
    tmp_path: Path, make_project: NewProject
) -> None:
    """The one names others that can; the other is asked with the first row with images."""
    project = project_of(make_project, tmp_path, "qwen2_5_vl", capture={"name": "blind"})
    (plugin := tmp_path / "odd_captures.py").write_text(CAPTURES)
    for folder in "ab":  # also where they are rendered already
        store = f"store=file:{tmp_path / folder}"
        output = project.cli("capture", store, ok=False, plugin=plugin).output
        assert "the data has rows with images, and here they cannot be read" in output
        assert "the capture 'blind' reads text alone\n  set capture.name=" in output
        project.cli("capture", store, "capture.name=hf")
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(reversed(lines)))  # text first
    late = (f"store=file:{tmp_path / 'late'}", f"run={tmp_path / 'other'}", "capture.name=late")
    output = project.cli("capture", *late, ok=False, plugin=plugin).output
    assert "this family's images are beyond it" in output
    assert plugin.with_suffix(".txt").read_text() == "(1,)"
    assert plugin.with_suffix(".closed").exists()


def test_evaluation_leaves_out_what_asks_about_images_and_says_so(
    tmp_path: Path, make_project: NewProject
) -> None:
    project = project_of(make_project, tmp_path, "qwen2_5_vl", store="auto")
    project.cli("train")
    shutil.copy(tmp_path / "train.jsonl", held_out := tmp_path / "held-out.jsonl")
    output = project.cli("eval", f"data.eval={held_out}").output
    assert "4 left out: it asks about images, and here text alone is asked" in output
