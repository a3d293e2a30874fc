"""Checkpoints: the authority on what a run has done.

One folder per step holds the draft, the optimizer, the random state and the plan's cursor. It is
written under another name, synced, renamed, and only then marked COMPLETE; a folder without the mark does not
exist for a reader. Tensors are safetensors, the rest JSON: no pickle.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import sync
from draftcore.training.ranks import ALONE, Ranks

MARK = "COMPLETE"
OPTIMIZER = "optimizer.safetensors"
STATE = {"step", "samples_seen", "config", "target", "plan", "data", "plugins", "given_up"}


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint; `state` is what `save` was given. Rank 0 reads it for all `ranks`."""

    folder: Path
    state: Mapping[str, Any]
    ranks: Ranks = ALONE

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def load_draft(self, draft: Draft) -> None:
        """Load the trained tensors; raises DraftcoreError where they do not fit the draft."""
        tensors = self.ranks.spread(lambda: _read(self.folder / "draft.safetensors"))
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
        for name, parameter in module.named_parameters():
            prefix = f"{name}/"
            found = {k[len(prefix) :]: t for k, t in self._kept.items() if k.startswith(prefix)}
            if found:
                on_cpu = {"step"} if not parameter.is_cuda else set()
                optimizer.state[parameter] = {
                    key: value if key in on_cpu else self.ranks.shard(value, parameter)
                    for key, value in found.items()
                }

    def random_state(self) -> dict[str, Tensor]:
        """The random states of this rank; none if the run that saved had fewer ranks."""
        return self.ranks.pick(self._kept)

    @functools.cached_property
    def _kept(self) -> dict[str, Tensor]:
        return self.ranks.spread(lambda: _read(self.folder / OPTIMIZER))


def save(
    root: Path,
    weights: dict[str, Tensor],
    kept: dict[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `state['step']` and drop all but the newest `keep`.

    `weights` are the draft's, `kept` the optimizer's moments and the random states. Raises
    DraftcoreError where they cannot be written.
    """
    folder = root / f"step-{state['step']:08d}"
    partial = root / f".{folder.name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial / "draft.safetensors", weights)
        _write(partial / OPTIMIZER, kept)
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        sync(partial / "state.json")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DraftcoreError(
            f"cannot write checkpoint {folder}: {error}\n"
            "  earlier checkpoints are intact; free space and run the same command to go on"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    (folder / MARK).touch()
    sync(folder / MARK)
    sync(folder)
    sync(root)
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def latest(
    root: Path, ranks: Ranks = ALONE, check: Callable[[Checkpoint], None] = lambda found: None
) -> Checkpoint | None:
    """Return the newest complete checkpoint under `root`, or None; `check` may refuse it."""

    def find() -> Checkpoint | None:
        folders = _complete(root)
        found = open_checkpoint(folders[-1]) if folders else None
        if found is not None:
            check(found)
        return found

    found = ranks.first(find, pack=_packed, unpack=_unpacked)
    return dataclasses.replace(found, ranks=ranks) if found else None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; raises UsageError where it is none or was not finished."""
    if not (folder / MARK).exists():
        there = "is not complete" if (folder / "state.json").exists() else "is no checkpoint"
        raise UsageError(f"{folder} {there}\n  choose a step-* folder that holds a file {MARK}")
    return Checkpoint(folder, _state(folder / "state.json"))


def trained_tensors(draft: Draft, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """The draft's state without what it copied from the target, whole, on the CPU of rank 0."""
    state = draft.module.state_dict()
    return ranks.whole((name, t) for name, t in state.items() if name not in draft.frozen)


def optimizer_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE
) -> dict[str, Tensor]:
    """The moments of each parameter, whole, on the CPU of rank 0."""
    return ranks.whole(
        (f"{name}/{key}", value)
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    )


def _state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        lacking = sorted(STATE - state.keys())
    except (OSError, ValueError, AttributeError) as error:
        raise DraftcoreError(_damaged(file, error)) from None
    if lacking:
        raise UsageError(
            f"{file} lacks {', '.join(lacking)}: another version of draftcore wrote it\n"
            "  go on with that one, or set another run folder to start anew"
        )
    return state


def _damaged(file: Path, error: Exception) -> str:
    return (
        f"cannot read {file}: {error}\n"
        "  the file is damaged; delete its folder to go on from the checkpoint before"
    )


def _packed(found: Checkpoint | None) -> list[Any] | None:
    return [str(found.folder), found.state] if found else None


def _unpacked(data: list[Any] | None) -> Checkpoint | None:
    return Checkpoint(Path(data[0]), data[1]) if data else None


def _complete(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob("step-*") if (folder / MARK).exists())


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors. safetensors refuses shared memory, so a weight of two names is written twice."""
    written: dict[int, str] = {t.untyped_storage().data_ptr(): name for name, t in tensors.items()}
    owners = set(written.values())
    save_file({name: t if name in owners else t.clone() for name, t in tensors.items()}, file)
    sync(file)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
        return tensors
    except (OSError, SafetensorError) as error:
        raise DraftcoreError(_damaged(file, error)) from None
