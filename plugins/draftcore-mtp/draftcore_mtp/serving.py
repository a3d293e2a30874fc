"""The serving layout `serving`: a copy of the target whose MTP layer is the trained one.

Servers load the layer from the target's own checkpoint. So an export is all of its files: names, shapes,
dtypes, shards and index are the target's, and no tensor but the layer's is another. Files that hold none
of it are hard links where the file system allows. A new layer goes into the last shard, and config.json
says that it is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftcore_hf.target import TransformersTarget, fetch
from draftcore_nn import serving
from draftcore_nn.layers import init_linears
from draftcore_nn.target import target_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.files import EXPORT
from draftcore_mtp import stored
from draftcore_mtp.config import from_target
from draftcore_mtp.model import MtpDraft
from draftcore_mtp.options import MtpOptions
from draftcore_mtp.stored import EMBEDDING, HEAD, Names

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# Fields of a target's config.json that another one of the same target may have otherwise.
IRRELEVANT = {"_name_or_path", "transformers_version", "dtype"}


@dataclass(frozen=True)
class Source:
    """Where a target lies: the folder of its config.json, and its tensors' files."""

    folder: Path
    files: Mapping[str, str]


# ---------------------------------------------------------------- building


def build(target: TargetSpec, options: MtpOptions, folder: Path | None = None) -> Draft:
    """Build a draft with the layer in `folder`, an export; else in the target's files; else a new one.

    A new layer is drawn from N(0, 0.02), with norms that multiply by 1. Raises UsageError where a layer
    is not as the target's config describes it.
    """
    if not isinstance(target, TransformersTarget):
        raise UsageError(
            f"target {target.path!r} is not read by transformers, and its MTP layer is read from such "
            "a target's files\n  choose target.name=hf, or another algorithm"
        )
    new = options.init == "fresh" and folder is None
    config = from_target(target, new or folder is not None)
    source = Source(Path(str(fetch(target, "config.json"))).parent, target.weight_files())
    tensors = dict[str, Tensor]()
    if not new:
        files = source.files if folder is None else same_target(folder, target).weight_files()
        place = Path(target.path) if folder is None else folder
        tensors = stored.read(files, Names.of(config), place)
    embedding_VH, head_VH = target_tensors(target)
    embedding_VH = tensors.pop(EMBEDDING, embedding_VH)
    head_VH = tensors.pop(HEAD, head_VH)
    module = MtpDraft(config, options, embedding_VH, head_VH, target.text_config)
    module.source, mtp = source, module.mtp
    if new:
        init_fresh(module)
    else:
        buffers = dict(mtp.named_buffers())
        for name in buffers.keys() & tensors.keys():
            buffers.pop(name).copy_(tensors.pop(name))
        if buffers:
            raise UsageError(f"{place} lacks {', '.join(buffers)}\n  use the complete model")
        serving.fill(mtp, tensors, place)
    for name, _ in mtp.named_parameters():
        module.stored[name] = tensors[name].dtype if tensors else target.dtype
    return Draft(
        module=module,
        config=dataclasses.asdict(config),
        defaults=TrainingDefaults(lr=6e-4, warmup_ratio=0.04, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=MtpDraft.FROZEN,
        about=f"the MTP layer, {config.text(layers=1)}",
    )


def init_fresh(module: MtpDraft) -> None:
    """Draw new weights; norms and biases are as they were made."""
    init_linears(module.mtp)
    for name, parameter in module.mtp.named_parameters():
        if parameter.ndim > 2 or name.endswith(
            "gate.weight"
        ):  # of experts, which are no linear layers
            torch.nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def same_target(folder: Path, target: TargetSpec) -> TransformersTarget:
    """Open an export; raises UsageError where its config.json is not this target's."""
    config = serving.read_config(folder)
    wanted = list(target.config.architectures or [])
    serving.require_architecture(config, folder, *wanted)
    code = bool(target.source.get("trust_remote_code"))
    there = TransformersTarget(str(folder), device="cpu", trust_remote_code=code)
    found = there.text_config.to_dict()
    sizes = {name: found[name] for name in ("hidden_size", "vocab_size")}
    serving.require_target({**sizes, "num_target_layers": there.num_layers}, target, folder)
    for name, ours in target.text_config.to_dict().items():
        if name not in IRRELEVANT and found.get(name) != ours:
            raise UsageError(
                f"config.json in {folder} says {name}: {found.get(name)}, the target's says {ours}\n"
                "  use the export with the target that it was trained for"
            )
    return there


# ---------------------------------------------------------------- export


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write the copy; raises as `draftcore_nn.serving.exportable` does."""
    module = draft.module
    assert isinstance(module, MtpDraft)
    source, config = module.source, module.config
    assert source is not None
    tensors = serving.exportable(layout, named(module, source))
    last = max(source.files.values())
    changed = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        changed.setdefault(source.files.get(name, last), {})[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted({*source.files.values()}):
        copied = folder / Path(file).name
        if file in changed:
            whole = {**load_file(file), **changed[file]}
            save_file(whole, copied, metadata={"format": "pt"})
        else:
            link_or_copy(Path(file).resolve(), copied)
    for each in sorted(source.folder.iterdir()):
        skipped = each.name in (EXPORT, "config.json") or each.name.startswith(".")
        if each.is_file() and each.suffix not in WEIGHTS and not skipped:
            shutil.copyfile(each, folder / each.name)
    data = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    if new := {name: tensor for name, tensor in tensors.items() if name not in source.files}:
        data.get("text_config", data)[config.kind.count] = 1
        if (folder / INDEX).exists():
            add_to_index(folder / INDEX, new, Path(last).name)
    serving.write_config(folder, data)


def named(module: MtpDraft, source: Source) -> dict[str, Tensor]:
    """Return the layer's tensors by their names in the target's files, in the stored dtypes."""
    found, names = dict[str, Tensor](), Names.of(module.config)
    for name, tensor in module.mtp.state_dict().items():
        whole = names.theirs(name) in source.files
        for part, piece in [(name, tensor)] if whole else stored.split(name, tensor):
            found[names.theirs(part)] = piece.to(module.stored.get(name, tensor.dtype))
    return found


def link_or_copy(file: Path, copied: Path) -> None:
    """Link a file of one's own, as its mode will be set; copy it where that cannot be."""
    try:
        if file.stat().st_uid != os.getuid():
            raise PermissionError(file)
        os.link(file, copied)
    except OSError:
        shutil.copyfile(file, copied)


def add_to_index(file: Path, tensors: Mapping[str, Tensor], shard: str) -> None:
    """Say in a checkpoint's index where new tensors are."""
    index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(tensors, shard)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index.setdefault("metadata", {})
    index["metadata"]["total_size"] = int(index["metadata"].get("total_size", 0)) + size
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
