"""A tiny target that takes images, and pictures; and what every reader of images must do.

A suite's subclass sets `plugin`. See `draftcore_sdk` for how to use it.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from draftcore_data.conversations import IMAGE_UNREAD
from draftcore_hf.target import TransformersTarget

from draftcore.contracts.capture import FeatureRequest, RowError
from draftcore.contracts.capture import ImageProcessor as Reader
from draftcore_sdk.suite import Suite, opened
from draftcore_sdk.targets import byte_tokenizer, tiny_target

PAD = "<|image_pad|>"
IMAGE_TOKENS = {"image_token": PAD, "boi_token": "<|image|>", "eoi_token": "<|vision_end|>"}
WRITTEN = {"gemma3": "<|image|>"}  # by the template for an image; of others PAD
SEEN = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def seeing_target(folder: Path, family: str) -> Path:
    """Write a target that sees, with the processor of its family.

    Qwen's own processor loads torchvision, for videos: that of PaddleOCR-VL does the same with images.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|im_end|>",
        pad_token="<|endoftext|>", extra_special_tokens=IMAGE_TOKENS,
    )  # fmt: skip
    template = SEEN.replace("PLACEHOLDER", WRITTEN.get(family, PAD))
    tiny_target(folder, family, vocab_size=262)
    config = json.loads((folder / "config.json").read_text())
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    config |= {"image_token_id": ids["image_token"], "mm_tokens_per_image": 4}
    config |= {"boi_token_index": ids["boi_token"], "eoi_token_index": ids["eoi_token"]}
    config["vision_config"]["deepstack_visual_indexes"] = [0]
    (folder / "config.json").write_text(json.dumps(config))
    processor: Any
    if family == "gemma3":
        reader = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        processor = transformers.Gemma3Processor(reader, tokenizer, image_seq_length=4)
    else:
        size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
        reader = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size)
        processor = transformers.PaddleOCRVLProcessor(reader, tokenizer)
    tokenizer.chat_template = processor.chat_template = template
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(file: Path, seed: int, width: int = 84) -> Path:
    noise = np.random.default_rng(seed).integers(0, 255, (56, width, 3), np.uint8)
    PIL.Image.fromarray(noise).save(file)
    return file


class ImageSuite(Suite):
    """Standard tests of what reads images, with a tiny Gemma 3."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> TransformersTarget:
        folder = seeing_target(tmp_path / "target", "gemma3")
        return TransformersTarget(str(folder), dtype="float32", device="cpu")

    @pytest.fixture
    def reader(self, target: TransformersTarget) -> Reader:
        found: Reader = opened(self.plugin, "images", self.name, {}, target=target)
        return found

    def test_images_are_written_where_their_tokens_stand_and_spans_move(
        self, reader: Reader, target: TransformersTarget, tmp_path: Path
    ) -> None:
        uris = [str(picture(tmp_path / f"{at}.png", at)) for at in range(2)]
        asked = "see <|image|> so <|image|>!", [(0, 3), (14, 16), (26, 27)], uris
        text, spans, ids, images = reader.write(*asked)
        assert [text[start:end] for start, end in spans] == ["see", "so", "!"]
        assert ids == target.load_tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert ids.count(target.config.image_token_id) == 2 * target.config.mm_tokens_per_image
        assert [one.uri for one in images] == uris

    def test_the_target_sees_its_image_and_none_that_was_changed(
        self, reader: Reader, target: TransformersTarget, tmp_path: Path
    ) -> None:
        request, states = FeatureRequest((), True, "float32"), []
        model = target.load_model()
        for seed in (0, 1, 0):
            uri = str(picture(tmp_path / "a.png", seed))
            _, _, ids, images = reader.write("<|image|>?", [], [uri])
            seen = model.forward_images(reader.inputs(ids, images), request)
            states.append(seen["last_hidden"][0])
            assert len(states[-1]) == len(ids)
        assert states[0].equal(states[2])
        assert not states[0].equal(states[1])
        picture(tmp_path / "a.png", 3)
        with pytest.raises(RowError, match=r"a\.png"):
            reader.inputs(ids, images)

    def test_an_image_that_cannot_be_read_is_named(self, reader: Reader, tmp_path: Path) -> None:
        (tmp_path / "torn.png").write_bytes(picture(tmp_path / "a.png", 0).read_bytes()[:99])
        for name in ("torn.png", "none.png"):
            with pytest.raises(RowError) as caught:
                reader.write("<|image|>", [], [str(tmp_path / name)])
            assert caught.value.args == (IMAGE_UNREAD, str(tmp_path / name))

    def test_another_process_reads_as_this_one(self, reader: Reader, tmp_path: Path) -> None:
        given: Any = "<|image|>", [], [str(picture(tmp_path / "a.png", 0))]
        other = pickle.loads(pickle.dumps(reader))
        assert other.write(*given) == reader.write(*given)
        assert (repr(other), other.identity()) == (repr(reader), reader.identity())
