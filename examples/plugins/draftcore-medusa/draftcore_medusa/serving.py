"""The serving layout `serving`: what vLLM's Medusa model loads.

`config.json` has `model_type: medusa`; the tensors are `blocks.i.layers.j.{weight,bias}` and the
target's head, once, as `lm_head.weight`: `original_lm_head` tells vLLM that all heads share it, and
it does not borrow the running target's. vLLM takes *any* key of config.json that holds `num` and
`heads` (or `layers`) for the number of heads (or layers), so there must be one of each and no more.
Weights of the blocks are the fp32 masters, so an export reloads exactly; vLLM casts them.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore_medusa.model import DraftConfig, MedusaDraft, build

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_medusa.options import MedusaOptions

LAYOUTS = ("serving",)
HEAD = "lm_head.weight"
# Fields whose other values change the computation, with the one that we compute and the default.
FIXED: Mapping[str, tuple[Any, Any]] = {
    "model_type": ("medusa", None),
    "medusa_fc_bias": (True, False),
    "original_lm_head": (True, False),
    "logit_scale": (1.0, 1.0),
}


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors.

    Raises UsageError for an unknown layout, DraftcoreError for weights that are not finite.
    """
    module = draft.module
    assert isinstance(module, MedusaDraft)
    if layout not in LAYOUTS:
        raise UsageError(
            f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}\n"
            f"  there is: {', '.join(LAYOUTS)} (read by vLLM)\n  ask for layout {LAYOUTS[0]}"
        )
    tensors = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DraftcoreError(
                f"tensor {name} is not finite: the training run diverged\n"
                "  export an earlier checkpoint, or train with a lower learning rate"
            )
    tensors[HEAD] = module.target_head.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(serving_config(module), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def serving_config(module: MedusaDraft) -> dict[str, Any]:
    """Return config.json's content; its `dtype` is the target's."""
    config, name = module.config, str(module.target_head.dtype).removeprefix("torch.")
    return {
        "architectures": ["MedusaModel"],
        **{field: value for field, (value, _) in FIXED.items()},
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "dtype": name,
        "torch_dtype": name,
    }


def load(folder: Path, target: TargetSpec, options: MedusaOptions) -> Draft:
    """Read a draft from this layout; raises UsageError naming what is not as we compute it."""
    config = read_config(folder, target, options)
    draft = build(target, config, options.decay)
    tensors, parameters = read_tensors(folder), dict(draft.module.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    check_shapes(tensors, {**shapes, HEAD: (config.vocab_size, config.hidden_size)}, folder)
    head_VH = draft.module.get_buffer("target_head")
    if not torch.equal(tensors[HEAD].to(head_VH.dtype), head_VH):
        raise UsageError(
            f"{HEAD} in {folder} is not the head of target {target.path!r}\n"
            "  use the target that the draft was trained for; a trained head cannot be read"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return draft


def read_config(folder: Path, target: TargetSpec, options: MedusaOptions) -> DraftConfig:
    """Read a draft's shape from config.json, and check it against the target and the options set."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"no draft at {folder}: it has no config.json\n  give an exported draft")
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for field, (value, default) in FIXED.items():
        if data.get(field, default) != value:
            raise UsageError(
                f"config.json in {folder} says {field}: {data.get(field, default)!r}\n"
                f"  this plugin reads {field}: {value!r} only"
            )
    try:
        fields = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
        found = DraftConfig(*(int(data[field]) for field in fields))
    except KeyError as error:
        raise UsageError(
            f"config.json in {folder} lacks {error}\n  add the field, or export the draft again"
        ) from None
    if data.get("truncated_vocab_size") not in (None, found.vocab_size):
        raise UsageError(
            f"the draft in {folder} has a vocabulary of {data['truncated_vocab_size']} tokens\n"
            f"  this plugin reads drafts of the target's whole vocabulary ({found.vocab_size}) only"
        )
    wanted = DraftConfig.of(target, options)
    chosen = options.model_fields_set & {"num_heads", "num_layers"}
    for name in ("hidden_size", "vocab_size", *sorted(chosen)):
        if getattr(found, name) != getattr(wanted, name):
            raise UsageError(
                f"the draft in {folder} has {name} {getattr(found, name)}, "
                f"the run {getattr(wanted, name)}\n"
                "  use it with the target it was trained for, and leave out options of its shape"
            )
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the folder, by vLLM's names."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UsageError(
            f"the draft in {folder} has no model.safetensors\n"
            "  give an exported draft; pickled weights could run code and are not read"
        )
    # vLLM drops this prefix, which some writers leave in.
    return {name.replace("medusa_heads.", ""): t for name, t in load_file(file).items()}


def check_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Raise UsageError naming every tensor that is missing, unknown or of another shape."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name} {list(shapes[name])}" for name in shapes if name not in found]
    problems += [f"unknown {name} {list(found[name])}" for name in found if name not in shapes]
    problems += [
        f"{name} is {list(found[name])}, not {list(shapes[name])}"
        for name in shapes
        if found.get(name, shapes[name]) != shapes[name]
    ]
    if problems:
        raise UsageError(
            f"the tensors in {folder} are not those its config.json describes:\n  "
            + "\n  ".join(problems)
            + "\n  use the complete draft"
        )
