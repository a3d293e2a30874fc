"""The files of an export: config.json and model.safetensors, written whole and read with care.

What reading refuses it names: the file or the field, what was expected, what is there, what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.files import regular

if TYPE_CHECKING:
    from pydantic import BaseModel

    from draftcore.contracts.target import TargetSpec

LAYOUT = "serving"
PICKLES = (".bin", ".pt", ".pth")

# ---------------------------------------------------------------- writing


def write_export(
    folder: Path, layout: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write an export in the layout `serving`; config.json, without which it is none, comes last.

    Raises as `exportable` does; then nothing is written.
    """
    stored = exportable(layout, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config)


def exportable(layout: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file takes them, on the CPU.

    Raises UsageError for another layout than `serving`, DraftcoreError for weights that are not finite.
    """
    if layout != LAYOUT:
        raise UsageError(
            f"there is no export layout {layout!r}{nearest(layout, [LAYOUT])}\n"
            f"  ask for layout {LAYOUT}"
        )
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DraftcoreError(
                f"tensor {name} is not finite: the training run diverged\n"
                "  export an earlier checkpoint, or train with a lower learning rate"
            )
    return stored


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json whole."""
    partial = folder / ".config.json"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


# ---------------------------------------------------------------- reading config.json


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json's content; raises UsageError where there is none."""
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(regular(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"no draft at {folder}: it has no config.json\n"
            "  give the folder of an exported or published draft"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}\n  export the draft again") from None
    return config


def require_architecture(config: Mapping[str, Any], folder: Path, *names: str) -> None:
    """Raise UsageError where config.json is of another layout, or names none of these architectures."""
    if "transformer_layer_config" in config:
        raise UsageError(
            f"the draft in {folder} is in the speculators layout\n"
            f"  convert it to the research layout, with architectures: [{names[0]!r}], first"
        )
    if not set(names) & set(config.get("architectures") or []):
        raise UsageError(
            f"config.json in {folder} has architectures {config.get('architectures')}\n"
            f"  a draft of this kind says architectures: [{names[0]!r}]\n"
            "  name the folder of such a draft, or choose the algorithm that wrote this one"
        )


def required(config: Mapping[str, Any], name: str, folder: Path) -> Any:
    """Return a field of config.json; raises UsageError where it is missing."""
    if config.get(name) is None:
        raise UsageError(
            f"config.json in {folder} lacks {name!r}\n  add the field, or export the draft again"
        )
    return config[name]


def require_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError where a field changes the computation from the one value that is computed.

    A field that is missing, or null, is taken to have that value.
    """
    for name, value in fixed.items():
        if config.get(name) not in (value, None):
            raise UsageError(
                f"config.json in {folder} says {name}: {config[name]!r}\n"
                f"  this plugin computes {name}: {value!r} only; the draft cannot be read"
            )


def require_target(shape: Mapping[str, Any], target: TargetSpec, folder: Path) -> None:
    """Raise UsageError where the draft is for another target, by those sizes that its shape names."""
    sizes = {
        "hidden_size": int(target.text_config.hidden_size),
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    for name, theirs in sizes.items():
        if (ours := shape.get(name, theirs)) != theirs:
            raise UsageError(
                f"the draft in {folder} has {name} {ours}, the target {theirs}\n"
                "  use the draft with the target it was trained for"
            )


def require_options(shape: Mapping[str, Any], options: BaseModel, folder: Path) -> None:
    """Raise UsageError for an option that was set to something other than the draft that is read has."""
    shape = {**(shape.get("rope") or {}), **shape}
    for name in sorted(options.model_fields_set & shape.keys()):
        asked = getattr(options, name)
        if asked is not None and asked != shape[name]:
            raise UsageError(
                f"option {name} is {asked}, but the draft in {folder} has {shape[name]}\n"
                f"  leave {name} out: a draft that is read keeps its shape"
            )


# ---------------------------------------------------------------- reading tensors


def read_tensors(folder: Path, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files, with prefixes that writers give them renamed.

    Rotary frequencies, which follow from config.json, are left out. Raises UsageError where there is
    no such file, or a damaged one; pickles are never read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        remedy = "give the folder of an exported draft"
        if pickled := sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES):
            remedy = f"{pickled[0]} is a pickle, which could run code; convert it to safetensors"
        raise UsageError(f"the draft in {folder} has no model.safetensors\n  {remedy}")
    found = {}
    for file in files:
        try:
            tensors = load_file(regular(file))
        except SafetensorError as error:
            raise UsageError(f"{file} is damaged: {error}\n  use the complete draft") from None
        for name, tensor in tensors.items():
            for theirs, ours in renamed.items():
                name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
            if not name.endswith("rotary_emb.inv_freq"):
                found[name] = tensor
    return found


def fill(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy tensors into a module's parameters of the same names.

    Raises UsageError naming every one that is missing, unknown or of another shape.
    """
    parameters = dict(module.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name} {shapes[name]}" for name in shapes if name not in found]
    problems += [f"unknown {name} {found[name]}" for name in found if name not in shapes]
    problems += [
        f"{name} is {found[name]}, not {shapes[name]}"
        for name in shapes
        if found.get(name, shapes[name]) != shapes[name]
    ]
    if problems:
        raise UsageError(
            f"the tensors in {folder} are not those that its config.json describes:\n  "
            + "\n  ".join(problems)
            + "\n  use the complete draft; tensors of other kinds of drafts are not supported"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
