"""Trained drafts outside training: load one from a checkpoint or an export, write an export."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import EXPORT, digest, read_sealed, require_exported, write_sealed
from draftcore.run import DraftRun, changes
from draftcore.training.checkpoint import DRAFT


def load_checkpoint(draft: DraftRun, folder: Path | None) -> tuple[Draft, dict[str, Any]]:
    """Rebuild a draft from the named checkpoint or the newest, on the CPU in fp32; and say what it is.

    See `open_draft`. Raises UsageError where there is none, or one of another run.
    """
    if (checkpoint := draft.checkpoint(folder)) is None:
        root = draft.folder / "checkpoints"
        raise UsageError(f"no finished checkpoint in {root}\n  run `draftcore train` first")
    state = checkpoint.state
    origin = {
        **{key: state[key] for key in ("step", "total_steps", "samples_seen", "plugins")},
        "weights": checkpoint.digests.get(DRAFT),
        "target": state["config"]["target"].get("path", ""),
        "target_fingerprint": state["target"],
        "algorithm": state["config"]["algorithm"],
        "chat_template": state["data"].get("chat_template", ""),
        "data": {key: value for key, value in state["data"].items() if key != "token_counts"},
        "settings": {key: state["config"][key] for key in ("data", "train")},
    }
    take_options(draft, checkpoint.folder, origin)
    built = draft.build(DataSummary.from_json(state["data"]))
    checkpoint.load_draft(built)
    return built, {"checkpoint": str(checkpoint.folder), **origin}


def take_options(draft: DraftRun, folder: Path, origin: Mapping[str, Any]) -> None:
    """Give a draft the options that the one in a folder was trained with, but for those that are free.

    Raises UsageError for another algorithm or target, and where the configuration sets an option to
    something else.
    """
    theirs, choice, target = origin["algorithm"], draft.choice, draft.run.target
    changed = [f"algorithm.name: {theirs['name']!r} then, {choice.name!r} now"]
    if theirs["name"] == choice.name:
        bind = functools.partial(draft.run.bind, "algorithm", choice.name, plugin=choice.plugin)
        trained = bind(theirs["options"]).options
        then = trained and trained.model_dump(mode="json")  # an algorithm may have no options
        draft.algorithm = bind({**theirs["options"], **choice.options})
        draft.options = draft.algorithm.options
        changed = list(changes(draft.options, then, "algorithm.options.")) if then else []
    if (now := target.fingerprint()) != (fingerprint := origin["target_fingerprint"]):
        changed.append(f"another target: {fingerprint} of {origin['target']!r} then, {now} now")
    if changed:
        remedy = "undo the change; options can be left out, as a trained draft brings its own"
        head = f"{folder} holds a draft that was trained otherwise"
        raise UsageError("\n  ".join([head, *changed, remedy]))


def open_draft(
    draft: DraftRun, checkpoint: Path | None, exported: Path | None
) -> tuple[Draft, Mapping[str, Any]]:
    """Open a draft to be evaluated: the newest checkpoint, a named one, or an export.

    With it comes what it is: its `step`, 0 where nobody knows, the digest of its trained `weights`, its
    algorithm, target, data and settings; its `checkpoint`, or the folder of its `export` with the digests
    of the `files` there. An export is read as servers would, and raises as `require_exported` does; its
    manifest brings its options.
    """
    if exported is None:
        return load_checkpoint(draft, checkpoint)
    if checkpoint is not None:
        raise UsageError("--checkpoint and --export were both given\n  name one draft to evaluate")
    if not (exported / "config.json").exists():
        raise UsageError(f"{exported} holds no config.json\n  name a folder that `export` wrote")
    require_exported(exported)
    if (manifest := exported / EXPORT).exists():
        take_options(draft, exported, about := read_sealed(manifest))
    else:
        about = {"step": 0, "files": digests(exported)}
    hook, target, options = draft.algorithm.hook, draft.run.target, draft.options
    built = hook.import_draft(folder=exported, target=target, options=options)
    return built, {"export": str(exported), **about}


def write_export(
    draft: DraftRun, checkpoint: Path | None, folder: Path, layout: str, *, force: bool = False
) -> int:
    """Write a checkpoint's draft for servers, with a manifest of where it came from and of its files.

    Returns its step. The folder appears whole or not at all, and is read by whom the umask lets read. It
    holds no path of this machine. Raises UsageError for one that holds something, unless it is an export
    and `force` replaces it, and for a layout that the algorithm does not offer; DraftcoreError where it
    cannot be written.
    """
    offers = sorted(name for name in draft.algorithm.capabilities if name.startswith("layout:"))
    if f"layout:{layout}" not in offers:
        names = ", ".join(name.removeprefix("layout:") for name in offers)
        problem = f"{draft.choice.name} does not export the layout {layout!r}"
        raise UsageError(f"{problem}\n  it offers: {names or 'none'}\n  choose one with --layout")
    replaced = force and (folder / EXPORT).is_file()
    if folder.exists() and any(folder.iterdir()) and not replaced:
        remedy = "choose another folder with --out, or empty it; --force replaces an export"
        raise UsageError(f"{folder} is not empty\n  {remedy}")
    built, origin = load_checkpoint(draft, checkpoint)
    del origin["checkpoint"]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            (partial := Path(beside, "export")).mkdir()
            hook, options = draft.algorithm.hook, draft.options
            hook.export_draft(draft=built, folder=partial, layout=layout, options=options)
            files, manifest = digests(partial), partial / EXPORT
            write_sealed(manifest, {**without_paths(origin), "files": files})
            for name in files:  # safetensors' own are for the user alone
                (partial / name).chmod(manifest.stat().st_mode)
            if replaced:
                folder.rename(partial.with_name("replaced"))
            partial.rename(folder)  # also onto an empty folder
    except (OSError, DraftcoreError) as error:
        if not isinstance(why := error.__cause__ or error, (OSError, SafetensorError)):
            raise
        problem = f"cannot write the export to {folder}: {why}"
        remedy = "free space there, or choose another folder with --out"
        raise DraftcoreError(f"{problem}\n  {remedy}") from None
    return int(origin["step"])


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder, by its path there."""
    return {f.relative_to(folder).as_posix(): digest(f) for f in folder.rglob("*") if f.is_file()}


def without_paths(value: Any) -> Any:
    """Return JSON data in which a path of this machine is its last part alone."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    _, editable, path = str(value).rpartition("editable: ")  # as a manifest says of a plugin
    local = os.path.isabs(path) or os.path.exists(os.path.expanduser(path))
    return f"{editable}{Path(path).name}" if local and isinstance(value, str) else value
