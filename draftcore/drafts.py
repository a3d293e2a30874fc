"""Trained drafts outside training: load one from a checkpoint or an export, write an export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import Draft
from draftcore.run import Run, read_summary, write_atomic
from draftcore.training.checkpoint import Checkpoint, latest, open_checkpoint, require_plugins


def find_checkpoint(run: Run, folder: Path | None) -> Checkpoint:
    """The named checkpoint, or the newest of the run; raises UsageError where it does not fit.

    A checkpoint fits a run of the same algorithm and target, with its plugins installed.
    """
    root = run.folder / "checkpoints"
    found = open_checkpoint(folder) if folder is not None else latest(root)
    if found is None:
        raise UsageError(f"no finished checkpoint in {root}\n  run `draftcore train` first")
    require_plugins(found, run.registry)
    theirs, ours = found.state["config"]["algorithm"]["name"], run.config.algorithm.name
    if theirs != ours:
        raise UsageError(
            f"{found.folder} holds a draft of algorithm {theirs!r}, the configuration says {ours!r}\n"
            "  set algorithm.name and its options as in the run that wrote it"
        )
    if found.state["target"] != run.target.fingerprint:
        raise UsageError(
            f"{found.folder} was trained for another target than {run.target.path!r}\n"
            f"  fingerprint {found.state['target']} then, {run.target.fingerprint} now\n"
            f"  it was {found.state['config']['target']['path']!r}: set target.path to that model"
        )
    return found


def load_checkpoint(run: Run, found: Checkpoint) -> Draft:
    """Rebuild a checkpoint's draft, on the CPU in fp32."""
    draft = run.build_draft(read_summary(found.state["data"]))
    found.load_draft(draft)
    return draft


def load_export(run: Run, folder: Path) -> Draft:
    """Read a draft from a serving layout, as servers would."""
    if not (folder / "config.json").exists():
        raise UsageError(
            f"{folder} holds no config.json\n  choose a folder that `draftcore export` wrote"
        )
    return run.algorithm.hook.import_draft(folder=folder, target=run.target, options=run.options)


def export(run: Run, found: Checkpoint, folder: Path, layout: str) -> Path:
    """Write a checkpoint's draft for servers, with a manifest of where it came from.

    The folder appears whole or not at all. Raises UsageError for one that holds something, and for
    a layout that the algorithm does not offer.
    """
    layouts = sorted(
        name.removeprefix("layout:")
        for name in run.algorithm.capabilities
        if name.startswith("layout:")
    )
    if layout not in layouts:
        raise UsageError(
            f"{run.config.algorithm.name} does not export the layout {layout!r}\n"
            f"  it offers: {', '.join(layouts) or 'none'}\n  choose one with --layout"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty\n  choose another folder with --out, or empty it")
    draft = load_checkpoint(run, found)
    aside = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        run.algorithm.hook.export_draft(draft=draft, folder=aside, layout=layout)
        origin = {key: found.state[key] for key in ("step", "samples_seen", "plugins")}
        origin |= {"target": run.target.path, "target_fingerprint": run.target.fingerprint}
        write_atomic(aside / "draftcore.json", json.dumps(origin, indent=1))
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DraftcoreError(f"cannot write the export to {folder}: {error}") from None
    if folder.exists():
        folder.rmdir()
    aside.rename(folder)
    return folder
