"""An MTP layer in a target's own files, from which transformers drops it when it loads the model.

Only files that hold the layer's prefix are opened. Experts lie there one by one, or fused as a model has
them: [E, 2I, H] for gate and up, [E, H, I] for down.

Shape letters: E experts, I width of an expert, H hidden, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftcore.errors import UsageError
from draftcore.files import regular
from draftcore_mtp.config import MtpConfig

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def read(files: Mapping[str, str], config: MtpConfig, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the layer by our names, in the stored dtypes, experts fused.

    Raises UsageError where there are none, and for a dtype that is no plain floating point.
    """
    held = [name for name in files if name.startswith(config.prefix)]
    if not held:
        some = ", ".join(sorted({re.sub(r"\d+", "N", name) for name in files})[:6])
        raise UsageError(
            f"{folder} holds no MTP layer: no tensor's name begins with {config.prefix!r}\n"
            f"  its {len(files)} tensors are {some}, ...\n"
            "  a model that transformers saved has lost its MTP layer: take the published files, or set "
            "algorithm.options.init=fresh to train a new one"
        )
    found = dict[str, Tensor]()
    for file in sorted({files[name] for name in held}):
        with safe_open(regular(Path(file)), framework="pt") as tensors:
            for name in (name for name in held if files[name] == file):
                found[config.ours(name.removeprefix(config.prefix))] = tensors.get_tensor(name)
    for name, tensor in found.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UsageError(
                f"{config.theirs(name)} in {folder} is stored as {tensor.dtype}, a quantised layer\n"
                "  it cannot be trained: take the model before it was quantised"
            )
    return dict(fused(found))


def fused(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stack experts that lie one by one."""
    single = dict[tuple[str, str], dict[int, Tensor]]()
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            owner, number, part = match.groups()
            single.setdefault((owner, part), {})[int(number)] = tensor
        else:
            yield name, tensor
    stacks = {key: torch.stack([t for _, t in sorted(e.items())]) for key, e in single.items()}
    for owner in {owner for owner, _ in stacks}:
        yield f"{owner}.down_proj", stacks[owner, "down"]
        yield f"{owner}.gate_up_proj", torch.cat([stacks[owner, "gate"], stacks[owner, "up"]], 1)


def split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Undo `fused` for the experts in one tensor."""
    owner, _, part = name.rpartition(".")
    names = ("gate", "up") if part == "gate_up_proj" else ("down",)
    for number, expert in enumerate(tensor):
        for kind, weight in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{owner}.{number}.{kind}_proj.weight", weight
