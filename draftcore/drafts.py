"""Trained drafts outside training: load one from a checkpoint or an export, write an export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.contracts.offers import FREE
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import EXPORT, digest, read_sealed, require_exported, write_sealed
from draftcore.run import DraftRun
from draftcore.training.checkpoint import Checkpoint


def find_checkpoint(draft: DraftRun, folder: Path | None) -> Checkpoint:
    """The named checkpoint, or the newest of the draft, which has the options it was trained with then.

    Raises UsageError where it does not fit: it fits a run of the same algorithm, options as far as they
    are set, and target, with its plugins installed.
    """
    checkpoint = draft.checkpoint(folder)
    if checkpoint is None:
        root = draft.folder / "checkpoints"
        raise UsageError(f"no finished checkpoint in {root}\n  run `draftcore train` first")
    take_options(draft, checkpoint.folder, origin_of(checkpoint))
    return checkpoint


def take_options(draft: DraftRun, folder: Path, origin: Mapping[str, Any]) -> None:
    """Give a draft the options that the one in a folder was trained with, but for those that are free.

    Raises UsageError for another algorithm or target, and where the configuration sets an option to
    something else.
    """
    theirs, choice, target = origin["algorithm"], draft.choice, draft.run.target
    if theirs["name"] != choice.name:
        raise UsageError(
            f"{folder} holds a draft of algorithm {theirs['name']!r}, the configuration says "
            f"{choice.name!r}\n  set algorithm.name and its options as in the run that wrote it"
        )
    trained = draft.run.bind("algorithm", choice.name, theirs["options"], choice.plugin)
    then, now = (bound.options.model_dump() for bound in (trained, draft.algorithm))
    fields = type(draft.options).model_fields
    free = [name for name in choice.options if FREE in fields[name].metadata]
    changed = [
        f"algorithm.options.{name}: {then[name]!r} then, {now[name]!r} now"
        for name in choice.options
        if then[name] != now[name] and name not in free
    ]
    if changed:
        raise UsageError(
            f"{folder} was trained with other options\n  "
            + "\n  ".join(changed)
            + "\n  leave them out: a trained draft brings its own"
        )
    if origin["target_fingerprint"] != target.fingerprint():
        raise UsageError(
            f"{folder} was trained for another target than {target.path!r}\n"
            f"  fingerprint {origin['target_fingerprint']} then, {target.fingerprint()} now\n"
            f"  it was {origin['target']!r}: set target.path to that model"
        )
    options = {**theirs["options"], **{name: choice.options[name] for name in free}}
    draft.algorithm = draft.run.bind("algorithm", choice.name, options, choice.plugin)
    draft.options = draft.algorithm.options


def load_checkpoint(draft: DraftRun, checkpoint: Checkpoint) -> Draft:
    """Rebuild a checkpoint's draft, on the CPU in fp32."""
    built = draft.build(DataSummary.from_json(checkpoint.state["data"]))
    checkpoint.load_draft(built)
    return built


def open_draft(
    draft: DraftRun, checkpoint: Path | None, exported: Path | None
) -> tuple[Draft, Mapping[str, Any]]:
    """Open a draft to be evaluated: the newest checkpoint, a named one, or an export.

    With it comes what it is: its `step`, 0 where nobody knows, and what `origin_of` says; its
    `checkpoint`, or the folder of its `export` with the digests of the `files` there.
    """
    if exported is None:
        opened = find_checkpoint(draft, checkpoint)
        about = {"checkpoint": str(opened.folder), **origin_of(opened)}
        return load_checkpoint(draft, opened), about
    if checkpoint is not None:
        raise UsageError("--checkpoint and --export were both given\n  name one draft to evaluate")
    return load_export(draft, exported)


def load_export(draft: DraftRun, folder: Path) -> tuple[Draft, Mapping[str, Any]]:
    """Read a draft from a serving layout, as servers would; raises as `require_exported` does.

    One with a manifest brings its options, and is of this target. See `open_draft`.
    """
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json\n  name a folder that `export` wrote")
    require_exported(folder)
    about: dict[str, Any] = {"step": 0}
    if (manifest := folder / EXPORT).exists():
        take_options(draft, folder, about := read_sealed(manifest))
    else:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        about["files"] = {file.relative_to(folder).as_posix(): digest(file) for file in files}
    hook, target = draft.algorithm.hook, draft.run.target
    built = hook.import_draft(folder=folder, target=target, options=draft.options)
    return built, {"export": str(folder), **about}


def export(
    draft: DraftRun, checkpoint: Checkpoint, folder: Path, layout: str, *, force: bool = False
) -> Path:
    """Write a checkpoint's draft for servers, with a manifest of where it came from and of its files.

    The folder appears whole or not at all, and is read by whom the umask lets read. It holds no path
    of this machine. Raises UsageError for one that holds something, unless it is an export and
    `force` replaces it, and for a layout that the algorithm does not offer; DraftcoreError where it
    cannot be written.
    """
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
    built, origin = load_checkpoint(draft, checkpoint), without_paths(origin_of(checkpoint))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            (partial := Path(beside, "export")).mkdir()
            hook, options = draft.algorithm.hook, draft.options
            hook.export_draft(draft=built, folder=partial, layout=layout, options=options)
            files, manifest = [f for f in partial.rglob("*") if f.is_file()], partial / EXPORT
            digests = {file.relative_to(partial).as_posix(): digest(file) for file in files}
            write_sealed(manifest, {**origin, "files": digests})
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
    return folder


def origin_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Say what a trained draft comes from: its run's target, algorithm, plugins and progress."""
    state = checkpoint.state
    return {
        **{key: state[key] for key in ("step", "samples_seen", "plugins")},
        "target": state["config"]["target"].get("path", ""),
        "target_fingerprint": state["target"],
        "algorithm": state["config"]["algorithm"],
        "chat_template": state["data"].get("chat_template", ""),
    }


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
