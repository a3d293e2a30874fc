"""Targets and tokenizers as llama.cpp reads them: Qwen3 of some megabytes, for tests and small models.

llama.cpp has a converter of its own, which knows each model and each tokenizer: whatever is not converted
here is refused with its command. A draft's file needs the target's tokenizer as well, which can be taken
from the file that the converter wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftcore_nn import serving
from torch import Tensor

from draftcore.errors import UsageError
from draftcore.files import regular
from draftcore_llamacpp.files import read_keys
from draftcore_llamacpp.methods import NORMED_LAYER, shape_keys

LARGEST = 2 << 30  # bytes of weights that are converted here, all in memory at once
OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
ENDS = ("eos", "eot", "eom")  # keys for tokens that end an answer
PRE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}  # llama.cpp's `gpt-2`


def converter(target: Path, kind: str) -> str:
    """Return the command of llama.cpp's own converter."""
    line = f"python convert_hf_to_gguf.py {target} --outfile target.gguf --outtype {kind}"
    return f"llama.cpp's own converter writes it (github.com/ggml-org/llama.cpp):\n  {line}"


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(regular(file).read_text(encoding="utf-8")) if file.is_file() else {}


def text_config(target: Path) -> Mapping[str, Any]:
    """Return the language model's part of a target's config.json."""
    config = serving.read_config(target)
    return config.get("text_config") or config


def target_keys(target: Path, kind: str) -> dict[str, Any]:
    """Return a target's keys; raises UsageError for one that llama.cpp's converter must write."""
    config = serving.read_config(target)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    wrong = [
        (config.get("model_type") != "qwen3", f"its model_type is {config.get('model_type')}"),
        (bool(config.get("attention_bias")), "its attention has biases"),
        (bool(config.get("use_sliding_window")), "some of its layers have a window"),
        (bool(config.get("quantization_config")), "its weights are quantised"),
        (size > LARGEST, f"its weights are {size / (1 << 30):.1f} GiB"),
    ]
    for bad, why in wrong:
        if bad:
            raise UsageError(
                f"the target in {target} is not converted here: {why}, and small Qwen3 are\n"
                f"  {converter(target, kind)}"
            )
    shape = {f"qwen3{key}": value for key, value in shape_keys(config, target).items()}
    return {**shape, **tokenizer_keys(target, None, int(config["vocab_size"]))}


def target_tensors(target: Path) -> dict[str, Tensor]:
    """Return a target's tensors as llama.cpp calls them; drafts borrow its head, so one is always there."""
    stored = serving.read_tensors(target, {"model.": ""})
    stored.setdefault("lm_head.weight", stored["embed_tokens.weight"])
    layers = int(serving.read_config(target)["num_hidden_layers"])
    names = OUTER | {
        f"layers.{i}.{ours}": f"blk.{i}.{theirs}"
        for i in range(layers)
        for ours, theirs in NORMED_LAYER.items()
    }
    if odd := sorted(stored.keys() ^ names.keys()):
        raise UsageError(
            f"the target in {target} has other tensors than a Qwen3: {', '.join(odd[:4])}\n"
            f"  {converter(target, 'f32')}"
        )
    return {names[name]: stored[name] for name in names}


def tokenizer_keys(target: Path, other: Path | None, vocab: int) -> dict[str, Any]:
    """Return the keys of a target's tokenizer: those of its GGUF file, if one is named, else made here.

    Raises UsageError for a tokenizer that llama.cpp's converter must write, and a file of another one.
    """
    if other is not None:
        keys = read_keys(other, "tokenizer.")
        if len(keys.get("tokenizer.ggml.tokens", ())) != vocab:
            raise UsageError(
                f"{other} has {len(keys.get('tokenizer.ggml.tokens', ()))} tokens, and the target in "
                f"{target} has {vocab}\n  name the GGUF file of the target that the draft is for"
            )
        return keys
    data, about = (read_json(target / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    before, model = data.get("pre_tokenizer") or {}, data.get("model") or {}
    known = all(before.get(key) == value for key, value in PRE.items())
    if not known or model.get("type") != "BPE" or data.get("normalizer"):
        raise UsageError(
            f"the tokenizer in {target} is not written here: byte-level BPE that splits as GPT-2's is\n"
            f"  {converter(target, 'bf16')}\n  then name that file: --tokenizer target.gguf"
        )
    added = {token["id"]: token for token in data.get("added_tokens") or ()}
    ids = {**model["vocab"], **{token["content"]: i for i, token in added.items()}}
    texts = {i: text for text, i in ids.items()}

    def kind(token: int) -> int:
        if token not in texts:
            return UNUSED
        if token not in added:
            return NORMAL
        return CONTROL if added[token]["special"] else USER_DEFINED

    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(vocab)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(vocab)],
        "tokenizer.ggml.merges": merges or ["Ġ Ġ"],  # no token; llama.cpp takes no empty list
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in special_tokens(target, about, ids)},
    }
    if template := about.get("chat_template"):
        keys["tokenizer.chat_template"] = template
    elif (file := target / "chat_template.jinja").is_file():
        keys["tokenizer.chat_template"] = regular(file).read_text(encoding="utf-8")
    return keys


def special_tokens(
    target: Path, about: Mapping[str, Any], ids: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Return the tokens that begin, pad and end a text, by llama.cpp's names; three may end one."""
    found = []
    for ours, theirs in (("bos_token", "bos"), ("pad_token", "padding"), ("eos_token", "eos")):
        token = about.get(ours)
        text = str(token["content"] if isinstance(token, Mapping) else token)
        if text in ids:
            found.append((theirs, ids[text]))
    config = {**text_config(target), **read_json(target / "generation_config.json")}
    ends = config.get("eos_token_id")
    if ends is None:
        return found
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) > len(ENDS):
        raise UsageError(
            f"the target in {target} has {len(ends)} tokens that end an answer, and a GGUF file "
            f"{len(ENDS)}\n  {converter(target, 'f32')}"
        )
    return [pair for pair in found if pair[0] != "eos"] + list(zip(ENDS, ends, strict=False))
