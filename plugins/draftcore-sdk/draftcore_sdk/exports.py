"""What tests of an algorithm's export share: to read one, to harm one, and the RoPEs that targets have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

GONE = "gone"  # in place of a value: without the field
THETA = {"rope_theta": 7e5}
LLAMA3 = {
    **THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def yarn(theta: float, factor: float, **more: Any) -> dict[str, Any]:
    """YaRN of a target that was first trained on 4,096 positions."""
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **more}
    return rope | {"original_max_position_embeddings": 4096}


# Those of gpt-oss-20b and -120b, DeepSeek-V3 and Kimi-K2 are as in these targets' config.json.
ROPES: dict[str, dict[str, Any]] = {
    "default": {**THETA, "rope_type": "default"}, "llama3": LLAMA3,
    "linear": {**THETA, "rope_type": "linear", "factor": 2.0},
    "partial": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    "yarn": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "gpt-oss": yarn(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    "deepseek-v3": yarn(10000.0, 40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    "kimi-k2": yarn(50000.0, 32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    "two mscales": yarn(10000.0, 40, mscale=1.0, mscale_all_dim=0.5, attn_factor=3.0),
    "attention_factor": yarn(10000.0, 40, attention_factor=0.9),
}  # fmt: skip

# ---------------------------------------------------------------- a folder


def config_of(folder: Path) -> dict[str, Any]:
    """The content of an export's config.json."""
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data


def change(folder: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """Edit config.json's content and the tensors of an export in place."""
    file, config = folder / "model.safetensors", config_of(folder)
    tensors = load_file(file)
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


def change_config(folder: Path, section: str = "", /, **fields: Any) -> None:
    """Set fields of config.json, or of one of its sections; GONE removes one."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        part = config[section] if section else config
        part.update(fields)
        for name in [name for name, value in fields.items() if value == GONE]:
            del part[name]

    change(folder, edit)


def change_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edit the tensors of an export in place."""
    change(folder, lambda _, tensors: edit(tensors))
