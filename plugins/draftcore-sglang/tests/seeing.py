"""Tiny Qwen2.5-VL and Qwen3-VL as they are published, with their own processors; and rows with images."""

import base64
import json
from pathlib import Path
from typing import Any

import PIL.Image
from draftcore_data.images import OwnProcessor
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.images import PAD, SEEN, picture
from draftcore_sdk.targets import byte_tokenizer, tiny_target

from draftcore.contracts.capture import CaptureBatch, FeatureRequest

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
