"""Checkpoints: the authority on what a run has done.

One folder per step holds the draft, the optimizer, the random state and the plan's cursor. It is
written under another name, synced, renamed, and only then gets its manifest, the file COMPLETE: the
format's number, and every file with its digest. A folder without it does not exist for a reader, and
a file that differs from its digest is not read. Tensors are safetensors, the rest JSON: no pickle.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import sync, write_atomic
from draftcore.training.distributed import ALONE, Forward, Ranks

MARK = "COMPLETE"
FORMAT = 2
OPTIMIZER = "optimizer.safetensors"


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

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, module: nn.Module, forward: Forward
    ) -> None:
        """Restore the optimizer's moments, to the bit, as `forward` places the weights."""
        for name, parameter in module.named_parameters():
            prefix = f"{name}/"
            found = {k[len(prefix) :]: t for k, t in self._kept.items() if k.startswith(prefix)}
            if found:
                on_cpu = {"step"} if not parameter.is_cuda else set()
                optimizer.state[parameter] = {
                    key: value if key in on_cpu else forward.place(value, parameter)
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
    try:
        partial.mkdir(parents=True)
        _write(partial / "draft.safetensors", weights)
        _write(partial / OPTIMIZER, kept)
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        sync(partial / "state.json")
        digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        write_atomic(folder / MARK, json.dumps({"format": FORMAT, "files": digests}, indent=1))
        sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DraftcoreError(
            f"cannot write checkpoint {folder}: {error}\n"
            "  earlier checkpoints are intact; free space and run the same command to go on"
        ) from None
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
    _require_whole(folder / "state.json")
    return Checkpoint(folder, json.loads((folder / "state.json").read_text()))


def trained_tensors(draft: Draft, rank: int = 0) -> dict[str, Tensor]:
    """The draft's state without what it copied from the target, whole, on the CPU of rank 0."""
    state = draft.module.state_dict()
    return _whole(((name, t) for name, t in state.items() if name not in draft.frozen), rank)


def optimizer_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0
) -> dict[str, Tensor]:
    """The moments of each parameter, whole, on the CPU of rank 0."""
    moments = (
        (f"{name}/{key}", value)
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    )
    return _whole(moments, rank)


def _whole(tensors: Iterable[tuple[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """Return tensors whole, on the CPU of rank 0; all ranks put the shards together."""
    found = {}
    for name, tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank == 0:
            found[name] = full.detach().cpu().contiguous()
    return found


def _require_whole(file: Path) -> None:
    """Raise UsageError for a checkpoint of another format, DraftcoreError for an altered file."""
    mark = file.parent / MARK
    try:
        manifest = json.loads(mark.read_text() or "{}")
        found = manifest.get("format")
    except (ValueError, AttributeError) as error:
        raise DraftcoreError(_damaged(mark, error)) from None
    if found != FORMAT:
        raise UsageError(
            f"{file.parent} has the format {found or 'of the first edition'}, and this draftcore "
            f"reads {FORMAT}\n  go on with the version that wrote it, or set another run folder to "
            "start anew"
        )
    try:
        if manifest["files"].get(file.name) != _digest(file):
            raise ValueError("its digest is not the manifest's")
    except (OSError, ValueError) as error:
        raise DraftcoreError(_damaged(file, error)) from None


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while piece := stream.read(16 << 20):
            digest.update(piece)
    return digest.hexdigest()


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
    _require_whole(file)
    try:
        tensors: dict[str, Tensor] = load_file(file)
        return tensors
    except (OSError, SafetensorError) as error:
        raise DraftcoreError(_damaged(file, error)) from None
