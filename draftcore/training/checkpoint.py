"""Checkpoints: the authority on what a run has done.

One folder per step holds the draft, the optimizer, the random state and the plan's cursor. Rank 0 has
a copy of them in its memory, which a thread writes while training goes on: under another name, synced,
renamed, and only then with its manifest, the file COMPLETE: the format's number, and every file with its
digest. A folder without it does not exist for a reader, and a file that differs from its digest is not
read. Tensors are safetensors, the rest JSON: no pickle.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import Ranks
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import STEPS, digest, read_sealed, regular, sync, write_atomic, write_sealed
from draftcore.plugins.dists import install_line
from draftcore.plugins.registry import Registry
from draftcore.training.optimizer import full, shard_like
from draftcore.training.ranks import SINGLE_RANK

logger = logging.getLogger(__name__)
MARK = "COMPLETE"
RUN = "run.json"  # in a run's folder its id, and how it ended; in a draft's, its best step
FORMAT = 2
Tensors = dict[str, Tensor]
DRAFT, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint; `state` is what `save` was given, `digests` are those of its files."""

    folder: Path
    state: Mapping[str, Any]
    digests: Mapping[str, str]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def load_draft(self, draft: Draft, ranks: Ranks = SINGLE_RANK) -> None:
        """Load the trained tensors on all ranks; raises UsageError where they do not fit the draft."""
        tensors = self._read(DRAFT, ranks)
        saved = {name: tensor.shape for name, tensor in tensors.items()}
        state = draft.module.state_dict().items()
        wanted = {name: tensor.shape for name, tensor in state if name not in draft.frozen}
        if differing := sorted({name for name, _ in wanted.items() ^ saved.items()}):
            raise UsageError(
                f"checkpoint {self.folder} does not fit the configured draft: {', '.join(differing[:4])}"
                "\n  use the algorithm options it was trained with (its state.json holds them)"
            )
        draft.module.load_state_dict(tensors, strict=False)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, module: nn.Module, ranks: Ranks
    ) -> Tensors:
        """Restore what the optimizer kept, to the bit, each tensor placed and sharded as its weight is.

        Returns the random states of this rank; none if the run that saved had fewer ranks.
        """
        saved: dict[str, Any] = {**self._read(OPTIMIZER, ranks), **self.state.get("optimizer", {})}
        weights: dict[str, Any] = dict(module.named_parameters())
        groups = {f"groups/{index}": group for index, group in enumerate(optimizer.param_groups)}
        counted = {  # as in torch's own load_state_dict, any other `step` stays on the CPU
            p for g in groups.values() if g.get("fused") or g.get("capturable") for p in g["params"]
        }
        for path, value in saved.items():
            name, _, key = path.rpartition("/")
            if name in groups:
                groups[name][key] = value
            elif (weight := weights.get(name)) is not None:
                if isinstance(value, Tensor) and (key != "step" or weight in counted):
                    value = value.to(weight.device)
                optimizer.state[weight][key] = shard_like(weight, value)
        tail = f".{ranks.rank}" if ranks.rank else ""
        names = [name for name in ("rng.cpu", "rng.cuda") if name + tail in saved]
        return {name: saved[name + tail] for name in names}

    def _read(self, name: str, ranks: Ranks) -> Tensors:
        """Read a file on rank 0, and give its tensors to all."""
        tensors: Tensors = {}

        def read() -> Tensors:
            _require_whole(self.folder / name)
            tensors.update(load_file(regular(self.folder / name)))
            return {name: tensor.to("meta") for name, tensor in tensors.items()}

        for key, like in ranks.on_rank0(read).items():
            ranks.broadcast(tensors.setdefault(key, torch.empty_like(like, device="cpu")))
        return tensors


def save(
    root: Path, weights: Tensors, optimizer: Tensors, state: Mapping[str, Any], keep: int
) -> Path:
    """Write the checkpoint of `state['step']` and drop all but the newest `keep` and the best.

    `weights` are the draft's, `optimizer` its optimizer's moments and the random states. Raises
    DraftcoreError where they cannot be written.
    """
    folder = root / f"step-{state['step']:08d}"
    partial = root / f".{folder.name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(weights, partial / DRAFT)
        save_file(optimizer, partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps(state, indent=1))
        files = sorted(partial.iterdir())
        for file in files:  # safetensors' own are for the user alone
            file.chmod((partial / STATE).stat().st_mode)
            sync(file)
        manifest = {"format": FORMAT, "files": {file.name: digest(file) for file in files}}
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        write_atomic(folder / MARK, json.dumps(manifest, indent=1))
        sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        problem = f"cannot write checkpoint {folder}: {error}"
        remedy = "earlier checkpoints are intact; free space and run the same command to go on"
        raise DraftcoreError(f"{problem}\n  {remedy}") from None
    spared = best(root).get("step")
    for old in sorted(root.glob(f"{STEPS}/{MARK}"))[:-keep]:
        if old.parent.name != spared:
            shutil.rmtree(old.parent)
    return folder


def latest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint under `root`, if any."""
    for folder in sorted(root.glob(STEPS), reverse=True):
        if (folder / MARK).exists():
            opened = open_checkpoint(folder)
            if folder.name == f"step-{opened.step:08d}":
                return opened
            raise UsageError(f"{folder} holds the checkpoint of step {opened.step}\n  move it away")
        logger.warning("%s has no %s and is left out: it was not finished", folder, MARK)
    return None


def read_run(folder: Path) -> dict[str, Any]:
    """Return what run.json in a folder holds. Raises UsageError where it was altered."""
    file = folder / RUN
    try:
        return read_sealed(file) if file.exists() else {}
    except ValueError:
        remedy = "delete it to give the run another id, or set another run folder"
        raise UsageError(f"{file} is not as draftcore wrote it\n  {remedy}") from None


def best(root: Path) -> Mapping[str, Any]:
    """Return what run.json says of the best checkpoint under `root`; nothing where none is there.

    Its folder, `step`, and on the held-out `rows` its `acceptance_length`, or its `loss`.
    """
    named = read_run(root.parent).get("best", {})
    return named if (root / named.get("step", "") / MARK).exists() else {}


def name_best(folder: Path, measure: str, value: float, rows: str) -> None:
    """Name a checkpoint in run.json if no other of the same held-out rows measures as well.

    That is a lower `loss`, or a higher `acceptance_length`; what was best by another measure is not.
    """
    run, before, sign = folder.parent.parent, best(folder.parent), -1 if measure == "loss" else 1
    anew = before.get("rows") != rows or measure not in before
    if math.isfinite(value) and (anew or sign * value > sign * before[measure]):
        named = {"step": folder.name, measure: value, "rows": rows}
        write_sealed(run / RUN, {**read_run(run), "best": named})


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; raises UsageError where it is none or was not finished."""
    if not (folder / MARK).exists():
        there = "is not complete" if (folder / STATE).exists() else "is no checkpoint"
        remedy = f"choose a step-* folder that holds a file {MARK}; best needs train.eval_every"
        raise UsageError(f"{folder} {there}\n  {remedy}")
    digests = _require_whole(folder / STATE)
    return Checkpoint(folder, json.loads((folder / STATE).read_text()), digests)


def trained_tensors(draft: Draft, rank: int = 0) -> Tensors:
    """Return the draft's state without what it copied from the target, whole, on the CPU of rank 0."""
    state = draft.module.state_dict()
    return _whole({name: t for name, t in state.items() if name not in draft.frozen}, rank)


def optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, fresh: Sequence[Any], rank: int
) -> tuple[Tensors, dict[str, Any]]:
    """Return what an optimizer keeps of each weight, and has changed in its groups since they were `fresh`.

    Tensors, whole, on the CPU of rank 0, and the rest. Raises DraftcoreError for what is neither.
    """
    state: dict[str, Any] = {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    for index, (group, was) in enumerate(zip(optimizer.param_groups, fresh, strict=True)):
        for key, value in group.items():
            if key not in ("params", "lr") and (key not in was or value != was[key]):
                state[f"groups/{index}/{key}"] = value
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if name not in tensors}
    if odd := [name for name, v in rest.items() if not isinstance(v, int | float | str | None)]:
        kind = type(optimizer).__name__
        raise DraftcoreError(f"{kind} keeps {odd[0]}, which is no tensor, number or text")
    return _whole(tensors, rank), rest


def _whole(tensors: Tensors, rank: int) -> Tensors:
    """Copy tensors whole to the CPU of rank 0; all ranks put the shards together.

    A weight of two names is copied twice, as safetensors refuses shared memory.
    """
    wholes = ((name, full(tensor).detach()) for name, tensor in tensors.items())
    return {name: t.to("cpu", copy=True).contiguous() for name, t in wholes if rank == 0}


def _require_whole(file: Path) -> Mapping[str, str]:
    """Raise UsageError for a checkpoint of another format, DraftcoreError for an altered file.

    Returns the digests of all its files.
    """
    damaged = file.parent / MARK
    try:
        manifest = json.loads(regular(damaged).read_text())
        if (found := manifest["format"]) != FORMAT:
            problem = f"{damaged} has the format {found}, and this draftcore reads {FORMAT}"
            remedy = "go on with the version that wrote it, or set another run folder to start anew"
            raise UsageError(f"{problem}\n  {remedy}")
        expected, damaged = manifest["files"].get(file.name), file
        if expected != digest(file):
            raise ValueError(f"its digest is not that in {MARK}")
        return cast(Mapping[str, str], manifest["files"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"cannot read {damaged}: {error}"
        remedy = "the file is damaged; delete its folder to go on from the checkpoint before"
        raise DraftcoreError(f"{problem}\n  {remedy}") from None


# ---------------------------------------------------------------- plugins that took part


def missing(described: Sequence[Mapping[str, str]], registry: Registry) -> str:
    """Say what brings back the plugins of a manifest that are here in no version, '' for none.

    What keeps one that is here from being used is said by who binds it.
    """
    here = {plugin.name for plugin in registry.installed}
    lines = ["this was made with plugins that are not here:"]
    for name, dist, version in ((e["name"], e["dist"], e["version"]) for e in described):
        if name not in here:
            file = version.startswith("sha256:")
            get = f"--plugin {dist}" if file else install_line(f"{dist}=={version}")
            lines.append(f"  {name} {version}: {get}")
    return "\n".join(lines) if lines[1:] else ""
