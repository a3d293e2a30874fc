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
from pathlib import Path

import torch
from draftcore_hf.target import TransformersTarget, fetch
from draftcore_nn import serving
from draftcore_nn.target import target_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.files import EXPORT, regular
from draftcore_mtp import stored
from draftcore_mtp.config import MtpConfig, from_target
from draftcore_mtp.model import MtpDraft
from draftcore_mtp.options import MtpOptions

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


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
    tensors = dict[str, Tensor]()
    if not new:
        there = target if folder is None else same_target(folder, target, config)
        tensors = stored.read(there.weight_files(), config, place := Path(there.path))
    embedding_VH, head_VH = target_tensors(target)
    # Some files have copies with the layer, which are used and not trained.
    embedding_VH = tensors.pop(config.ours("embed_tokens.weight"), embedding_VH)
    head_VH = tensors.pop(config.ours("shared_head.head.weight"), head_VH)
    module = MtpDraft(config, options, embedding_VH, head_VH, target.text_config)
    module.folder, mtp = Path(str(fetch(target, "config.json"))).parent, module.mtp
    module.files |= target.weight_files()
    if new:
        for name, parameter in mtp.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
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


def same_target(folder: Path, target: TargetSpec, config: MtpConfig) -> TransformersTarget:
    """Open an export; raises UsageError where its config.json is not this target's."""
    kinds = target.config.architectures or []
    serving.require_architecture(serving.read_config(folder), folder, *kinds)
    there = TransformersTarget(str(folder), device="cpu", **target.source)
    found = vars(from_target(there, new=True))
    serving.require_target(found, target, folder)
    serving.require_fixed(found, vars(config), folder)
    return there


# ---------------------------------------------------------------- export


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write the copy; raises as `draftcore_nn.serving.exportable` does."""
    module = draft.module
    assert isinstance(module, MtpDraft)
    tensors = serving.exportable(layout, named(module))
    last, changed = max(module.files.values()), dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        changed.setdefault(module.files.get(name, last), {})[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for file in {*module.files.values()}:
        if file in changed:
            whole = {**load_file(regular(Path(file))), **changed[file]}
            save_file(whole, folder / Path(file).name, metadata={"format": "pt"})
        else:
            link_or_copy(Path(file).resolve(), folder / Path(file).name)
    for each in module.folder.iterdir():
        skipped = each.name in (EXPORT, "config.json") or each.name.startswith(".")
        if each.is_file() and each.suffix not in WEIGHTS and not skipped:
            shutil.copyfile(each, folder / each.name)
    config = serving.read_config(module.folder)
    if new := [name for name in tensors if name not in module.files]:
        config.get("text_config", config)[module.config.kind.count] = 1
        if (index := folder / INDEX).exists():
            data = json.loads(regular(index).read_text(encoding="utf-8"))
            data["weight_map"] |= dict.fromkeys(new, Path(last).name)
            data["metadata"]["total_size"] += sum(tensors[name].nbytes for name in new)
            index.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    serving.write_config(folder, config)


def named(module: MtpDraft) -> dict[str, Tensor]:
    """Return the layer's tensors by their names in the target's files, in the stored dtypes."""
    found, theirs = dict[str, Tensor](), module.config.theirs
    for name, tensor in module.mtp.state_dict().items():
        tensor = tensor.to(module.stored.get(name, tensor.dtype))
        apart = ".mlp.experts." in name and theirs(name) not in module.files
        parts = stored.split(name, tensor) if apart else [(name, tensor)]
        found |= {theirs(part): piece for part, piece in parts}
    return found


def link_or_copy(file: Path, copied: Path) -> None:
    """Link a file of one's own, as its mode will be set; copy it where that cannot be."""
    try:
        if file.stat().st_uid != os.getuid():
            raise PermissionError(file)
        os.link(file, copied)
    except OSError:
        shutil.copyfile(file, copied)
