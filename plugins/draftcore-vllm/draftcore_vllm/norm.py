"""The target's final norm, which vLLM captures the input of: applied here, as transformers does.

Shape letters: T tokens, H width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from draftcore_hf.target import TransformersTarget
from safetensors import safe_open
from torch import nn
from transformers import AutoModel

from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.files import regular


def final_norm(target: TargetSpec) -> nn.Module:
    """Make the norm behind a target's last layer, with its weights, on the CPU.

    The model is made without weights, for the norm's class and place. Raises UsageError where a target
    is none of transformers', or it cannot be told which of its modules that norm is.
    """
    if not isinstance(target, TransformersTarget):
        raise UsageError(
            f"the captures of vLLM take targets by transformers, and {target.path!r} is none\n"
            "  set capture.name to that of the target's own plugin"
        )
    with torch.device("meta"):
        trusted = {"trust_remote_code": target.source["trust_remote_code"]}
        model: Any = AutoModel.from_config(target.text_config, dtype=target.dtype, **trusted)
    width = (int(target.text_config.hidden_size),)
    stacks = (
        (decoder, name)
        for decoder in model.modules()
        for name, layers in decoder.named_children()
        if isinstance(layers, nn.ModuleList) and len(layers) == target.num_layers
    )
    decoder, layers = next(stacks, (model, ""))
    norms: dict[str, nn.Module] = {
        name: module
        for name, module in decoder.named_children()
        if (weights := [*module.parameters()]) and all(w.shape == width for w in weights)
    }
    files, last = target.weight_files(), f"{layers}.{target.num_layers - 1}."
    prefixes = {name.partition(last)[0] for name in files if last in name}
    for prefix in sorted(prefixes):
        for name, norm in norms.items() if len(norms) == 1 else ():
            places = {key: f"{prefix}{name}.{key}" for key, _ in norm.named_parameters()}
            if {*places.values()} <= files.keys():
                stored = {key: read(files[place], place) for key, place in places.items()}
                held = {key: value.to(target.dtype) for key, value in stored.items()}
                norm.load_state_dict(held, assign=True)
                norm.requires_grad_(False)
                return norm
    raise UsageError(
        f"of {target.path!r} it cannot be told which is the final norm, whose input vLLM captures\n"
        f"  candidates in {type(decoder).__name__}: {', '.join(norms) or 'none'}\n"
        "  capture with capture.name=hf"
    )


def read(file: str, name: str) -> torch.Tensor:
    with safe_open(regular(Path(file)), framework="pt") as tensors:
        return tensors.get_tensor(name)  # type: ignore[no-any-return]
