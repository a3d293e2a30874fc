"""Checkpoints: the authority on what a run has done.

One folder per step holds the draft, the optimizer, the random state and the plan's cursor. It is
written aside, synced, renamed, and only then marked COMPLETE; a folder without the mark does not
exist for a reader. Tensors are safetensors, the rest JSON: no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.errors import DraftcoreError, UsageError
from draftcore.plugins import Registry
from draftcore.records import Draft

MARK = "COMPLETE"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint; `state` is what `save` was given."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def load_draft(self, draft: Draft) -> None:
        """Load the trained tensors; raises DraftcoreError where they do not fit the draft."""
        tensors = _read(self.folder / "draft.safetensors")
        wanted = {
            name: t for name, t in draft.module.state_dict().items() if name not in draft.frozen
        }
        differing = [
            name
            for name in sorted({*tensors, *wanted})
            if name not in tensors
            or name not in wanted
            or tensors[name].shape != wanted[name].shape
        ]
        if differing:
            raise UsageError(
                f"checkpoint {self.folder} does not fit the configured draft: {', '.join(differing[:4])}"
                "\n  use the algorithm options it was trained with (its state.json holds them)"
            )
        draft.module.load_state_dict(tensors, strict=False)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Restore the optimizer's moments, to the bit."""
        tensors = _read(self.folder / OPTIMIZER)
        for name, parameter in module.named_parameters():
            prefix = f"{name}/"
            found = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if found:
                on_cpu = {"step"} if not parameter.is_cuda else set()
                optimizer.state[parameter] = {
                    key: value if key in on_cpu else value.to(parameter.device)
                    for key, value in found.items()
                }

    def random_state(self) -> dict[str, Tensor]:
        """The random states that `save` was given."""
        tensors = _read(self.folder / OPTIMIZER)
        return {name: tensor for name, tensor in tensors.items() if name.startswith("rng.")}


def save(
    root: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    random_state: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `state['step']` and drop all but the newest `keep`."""
    folder = root / f"step-{state['step']:08d}"
    aside = root / f".{folder.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write(aside / "draft.safetensors", trained_tensors(draft))
        _write(aside / OPTIMIZER, {**_optimizer_tensors(draft.module, optimizer), **random_state})
        (aside / "state.json").write_text(json.dumps(state, indent=1))
        _sync(aside / "state.json")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DraftcoreError(
            f"cannot write checkpoint {folder}: {error}\n"
            "  earlier checkpoints are intact; free space and run the same command to go on"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    (folder / MARK).touch()
    _sync(folder / MARK)
    _sync(folder)
    _sync(root)
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def latest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint under `root`, or None."""
    folders = _complete(root)
    return open_checkpoint(folders[-1]) if folders else None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; raises UsageError where it is none or was not finished."""
    if not (folder / MARK).exists():
        there = "is not complete" if (folder / "state.json").exists() else "is no checkpoint"
        raise UsageError(f"{folder} {there}\n  choose a step-* folder that holds a file {MARK}")
    return Checkpoint(folder, json.loads((folder / "state.json").read_text()))


def require_plugins(found: Checkpoint, registry: Registry) -> None:
    """Raise UsageError where a plugin that took part in a checkpoint's run is not here."""
    if missing := registry.missing(found.state["plugins"]):
        raise UsageError(f"{found.folder}: {missing}")


def trained_tensors(draft: Draft) -> dict[str, Tensor]:
    """The draft's state without what it copied from the target, on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in draft.module.state_dict().items()
        if name not in draft.frozen
    }


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value.detach().cpu().contiguous()
    return tensors


def _complete(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob("step-*") if (folder / MARK).exists())


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, file)
    _sync(file)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
        return tensors
    except (OSError, SafetensorError) as error:
        raise DraftcoreError(
            f"cannot read {file}: {error}\n"
            "  the file is damaged; delete its folder to go on from the checkpoint before"
        ) from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
