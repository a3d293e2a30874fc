"""Trained drafts outside training: load one from a checkpoint or an export, write an export."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import EXPORT, digest, require_exported, write_sealed
from draftcore.run import DraftRun
from draftcore.training.checkpoint import Checkpoint


def find_checkpoint(draft: DraftRun, folder: Path | None) -> Checkpoint:
    """The named checkpoint, or the newest of the draft; raises UsageError where it does not fit.

    A checkpoint fits a run of the same algorithm and target, with its plugins installed.
    """
    checkpoint, target = draft.checkpoint(folder), draft.run.target
    if checkpoint is None:
        root = draft.folder / "checkpoints"
        raise UsageError(f"no finished checkpoint in {root}\n  run `draftcore train` first")
    theirs, ours = checkpoint.state["config"], draft.choice.name
    if theirs["algorithm"]["name"] != ours:
        raise UsageError(
            f"{checkpoint.folder} holds a draft of algorithm {theirs['algorithm']['name']!r}, the "
            f"configuration says {ours!r}\n"
            "  set algorithm.name and its options as in the run that wrote it"
        )
    if checkpoint.state["target"] != target.fingerprint():
        raise UsageError(
            f"{checkpoint.folder} was trained for another target than {target.path!r}\n"
            f"  fingerprint {checkpoint.state['target']} then, {target.fingerprint()} now\n"
            f"  it was {theirs['target']['path']!r}: set target.path to that model"
        )
    return checkpoint


def load_checkpoint(draft: DraftRun, checkpoint: Checkpoint) -> Draft:
    """Rebuild a checkpoint's draft, on the CPU in fp32."""
    built = draft.build(DataSummary.from_json(checkpoint.state["data"]))
    checkpoint.load_draft(built)
    return built


def open_draft(
    draft: DraftRun, checkpoint: Path | None, exported: Path | None
) -> tuple[Draft, int]:
    """Open a draft to be evaluated, and its step: the newest checkpoint, a named one, or an export.

    An export is read as servers would, and raises as `require_exported` does.
    """
    if exported is None:
        last = find_checkpoint(draft, checkpoint)
        return load_checkpoint(draft, last), last.step
    if checkpoint is not None:
        raise UsageError("--checkpoint and --export were both given\n  name one draft to evaluate")
    if not (exported / "config.json").exists():
        raise UsageError(f"{exported} holds no config.json\n  name a folder that `export` wrote")
    require_exported(exported)
    hook, target, options = draft.algorithm.hook, draft.run.target, draft.options
    return hook.import_draft(folder=exported, target=target, options=options), 0


def write_export(
    draft: DraftRun, checkpoint: Path | None, folder: Path, layout: str, *, force: bool = False
) -> int:
    """Write a checkpoint's draft for servers, with a manifest of where it came from and of its files.

    Returns its step. The folder appears whole or not at all, and is read by whom the umask lets read. It
    holds no path of this machine. Raises UsageError for one that holds something, unless it is an export
    and `force` replaces it, and for a layout that the algorithm does not offer; DraftcoreError where it
    cannot be written.
    """
    last = find_checkpoint(draft, checkpoint)
    offers = sorted(name for name in draft.algorithm.capabilities if name.startswith("layout:"))
    if f"layout:{layout}" not in offers:
        names = ", ".join(name.removeprefix("layout:") for name in offers)
        raise UsageError(
            f"{draft.choice.name} does not export the layout {layout!r}\n"
            f"  it offers: {names or 'none'}\n  choose one with --layout"
        )
    replaced = force and (folder / EXPORT).is_file()
    if folder.exists() and any(folder.iterdir()) and not replaced:
        remedy = "choose another folder with --out, or empty it; --force replaces an export"
        raise UsageError(f"{folder} is not empty\n  {remedy}")
    built, state, target = load_checkpoint(draft, last), last.state, draft.run.target
    origin = {
        **{key: state[key] for key in ("step", "samples_seen", "plugins")},
        "target": target.path,
        "target_fingerprint": target.fingerprint(),
        "algorithm": state["config"]["algorithm"],
        "chat_template": state["data"].get("chat_template", ""),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            (partial := Path(beside, "export")).mkdir()
            hook, options = draft.algorithm.hook, draft.options
            hook.export_draft(draft=built, folder=partial, layout=layout, options=options)
            files, manifest = [f for f in partial.rglob("*") if f.is_file()], partial / EXPORT
            digests = {file.relative_to(partial).as_posix(): digest(file) for file in files}
            write_sealed(manifest, {**without_paths(origin), "files": digests})
            for file in files:  # safetensors' own are for the user alone
                file.chmod(manifest.stat().st_mode)
            if replaced:
                folder.rename(partial.with_name("replaced"))
            partial.rename(folder)  # also onto an empty folder
    except (OSError, DraftcoreError) as error:
        if not isinstance(why := error.__cause__ or error, (OSError, SafetensorError)):
            raise
        raise DraftcoreError(
            f"cannot write the export to {folder}: {why}\n"
            "  free space there, or choose another folder with --out"
        ) from None
    return last.step


def without_paths(value: Any) -> Any:
    """Return JSON data in which a path of this machine is its last part alone."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    _, editable, path = value.rpartition("editable: ")  # as a manifest says of a plugin
    local = os.path.isabs(path) or os.path.exists(os.path.expanduser(path))
    return f"{editable}{Path(path).name}" if local else value
