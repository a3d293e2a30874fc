"""What the tests of both captures share: a run's folder, features beside transformers', targets that see.

These are tiny Qwen2.5-VL and Qwen3-VL as they are published, with their own processors; and rows with images.
"""

import base64
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import yaml
from draftcore_data.images import OwnProcessor
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import Reference
from draftcore_sdk.images import PAD, SEEN, picture
from draftcore_sdk.targets import byte_tokenizer, conversations, tiny_target
from torch import Tensor

from draftcore.contracts.capture import CaptureBatch, FeatureRequest

SAMPLES, BATCH, EPOCHS = 24, 4, 2


def require_features(
    features: Mapping[str, Tensor], tokens: Sequence[int], reference: Reference
) -> None:
    """Compare with transformers: in fp32, 5.4e-7 of the largest number was the largest difference."""
    for name, expected_TH in reference.features(tokens).items():
        gap = (features[name] - expected_TH).abs().max() / expected_TH.abs().max()
        assert gap < 1e-5, (name, float(gap))


def write_run(folder: Path, target: Path, **changes: Any) -> Path:
    """Write the YAML of a run; `changes` are to its keys, those of `train` beside the ones here."""
    folder.mkdir()
    train = {"batch": BATCH, "epochs": EPOCHS, "lr": 0.003, "log_every": 1, "eval_every": 0}
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": str(conversations(folder / "train.jsonl", SAMPLES)),
            "eval": str(conversations(folder / "eval.jsonl", ["yes it is", "abcabcabc", "no"])),
        },
        "algorithm": {"name": "eagle3", "options": {"layers": [0, 1, 2], "ttt_length": 2}},
        "eval": {"max_new_tokens": 8},
        **changes,
        "train": {**train, "device": "cpu", **changes.get("train", {})},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def losses(file: Path) -> list[float]:
    """The loss of each step of a run."""
    lines = map(json.loads, (file.parent / "run" / "metrics.jsonl").read_text().splitlines())
    found = [line["loss"] for line in lines if "loss" in line]
    assert len(found) == EPOCHS * SAMPLES // BATCH
    return found


def require_engine_ended(forward: Callable[[], object]) -> None:
    """Kill rank 1. A queue would skip a batch that fails by a DraftcoreError, and no batch is at fault."""
    pids = [process.pid for process in active_children() if process.name.startswith("sglang-")]
    (killed,) = [process.pid for process in active_children() if process.name == "sglang-1"]
    os.kill(killed or 0, signal.SIGKILL)
    says = rf"engine of .* has ended: rank 1 .*\n.*{killed}, exit status -9"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            forward()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---------------------------------------------------------------- targets that see

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
REQUEST = FeatureRequest((0, 2, 5), True, "float32")
PLACE = f"<|vision_start|>{PAD}<|vision_end|>"
TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": PAD,
    "video_token": "<|video_pad|>",
}


def seeing_qwen(folder: Path, family: str, largest: int = 16, **rope: Any) -> Path:
    """Write a target that takes images of up to `largest` tokens; `rope` is of its positions."""
    import transformers as hf  # after torchvision was mended

    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=TOKENS,
    )
    tiny_target(folder, family, vocab_size=264)
    config = json.loads((folder / "config.json").read_text())
    config |= {f"{name}_id": tokenizer.convert_tokens_to_ids(TOKENS[name]) for name in TOKENS}
    published = {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    config["text_config"]["rope_parameters"] |= {**published, **rope}
    config["vision_config"]["deepstack_visual_indexes"] = [0]
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * largest}
    reader = hf.Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=size)
    own, videos = {
        "qwen2_5_vl": (hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor),
        "qwen3_vl": (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor),
    }[family]
    own(reader, tokenizer, videos(patch_size=14, merge_size=2)).save_pretrained(folder)
    tokenizer.chat_template = SEEN.replace("PLACEHOLDER", PLACE)
    tokenizer.save_pretrained(folder)
    return folder


def target_that_sees(folder: Path) -> TransformersTarget:
    """Open a target that sees, as a run does."""
    target = TransformersTarget(str(folder), device="cpu")
    target.images = OwnProcessor(target.path, target.source)
    return target


def batch_about(folder: Path, target: TransformersTarget) -> CaptureBatch:
    """Rows about two images, about none, and about one that was taken with the camera on its side."""
    first, second = picture(folder / "0.png", 0, 84), picture(folder / "1.png", 1, 56)
    data = f"data:image/png;base64,{base64.b64encode(second.read_bytes()).decode()}"
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # its orientation
    PIL.Image.open(first).save(folder / "turned.jpg", exif=turned)
    rows = [(f"hi {PLACE} and {PLACE}?", [str(first), data]), ("just text", [])]
    rows.append((f"see {PLACE}", [str(folder / "turned.jpg")]))
    assert target.images is not None
    written = [target.images.write(text, [], uris)[2:] for text, uris in rows if uris]
    written.insert(1, (target.load_tokenizer()(rows[1][0])["input_ids"], ()))
    ids, images = zip(*written, strict=True)
    return CaptureBatch(0, (4, 7, 9), tuple("abc"[at] * 24 for at in range(3)), ids, images)
