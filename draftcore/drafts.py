"""Trained drafts outside training: load one from a checkpoint or an export, write an export."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from draftcore.contracts.algorithm import Draft
from draftcore.data.samples import read_summary
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import EXPORT, digest, require_exported, write_sealed
from draftcore.run import DraftRun
from draftcore.training.checkpoint import Checkpoint


def find_checkpoint(draft: DraftRun, folder: Path | None) -> Checkpoint:
    """The named checkpoint, or the newest of the draft; raises UsageError where it does not fit.

    A checkpoint fits a run of the same algorithm and target, with its plugins installed.
    """
    found, target = draft.checkpoint(folder), draft.run.target
    if found is None:
        root = draft.folder / "checkpoints"
        raise UsageError(f"no finished checkpoint in {root}\n  run `draftcore train` first")
    theirs, ours = found.state["config"], draft.choice.name
    if theirs["algorithm"]["name"] != ours:
        raise UsageError(
            f"{found.folder} holds a draft of algorithm {theirs['algorithm']['name']!r}, the "
            f"configuration says {ours!r}\n"
            "  set algorithm.name and its options as in the run that wrote it"
        )
    if found.state["target"] != target.fingerprint():
        raise UsageError(
            f"{found.folder} was trained for another target than {target.path!r}\n"
            f"  fingerprint {found.state['target']} then, {target.fingerprint()} now\n"
            f"  it was {theirs['target']['path']!r}: set target.path to that model"
        )
    return found


def load_checkpoint(draft: DraftRun, found: Checkpoint) -> Draft:
    """Rebuild a checkpoint's draft, on the CPU in fp32."""
    built = draft.build(read_summary(found.state["data"]))
    found.load_draft(built)
    return built


def open_draft(
    draft: DraftRun, checkpoint: Path | None, exported: Path | None
) -> tuple[Draft, int]:
    """Open a draft to be evaluated, and its step: the newest checkpoint, a named one, or an export."""
    if exported is None:
        found = find_checkpoint(draft, checkpoint)
        return load_checkpoint(draft, found), found.step
    if checkpoint is not None:
        raise UsageError("--checkpoint and --export were both given\n  name one draft to evaluate")
    return load_export(draft, exported), 0


def load_export(draft: DraftRun, folder: Path) -> Draft:
    """Read a draft from a serving layout, as servers would; raises as `require_exported` does."""
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json\n  name a folder that `export` wrote")
    require_exported(folder)
    target, options = draft.run.target, draft.options
    return draft.algorithm.hook.import_draft(folder=folder, target=target, options=options)


def export(
    draft: DraftRun, found: Checkpoint, folder: Path, layout: str, *, force: bool = False
) -> Path:
    """Write a checkpoint's draft for servers, with a manifest of where it came from and of its files.

    The folder appears whole or not at all, and is read by whom the umask lets read. It holds no path
    of this machine. Raises UsageError for one that holds something, unless it is an export and
    `force` replaces it, and for a layout that the algorithm does not offer; DraftcoreError where it
    cannot be written.
    """

    def named(found: re.Match[str]) -> str:
        local = os.path.isabs(found[2]) or os.path.exists(os.path.expanduser(found[2]))
        return f'"{found[1]}{Path(found[2]).name}"' if local else found[0]

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
    built, target = load_checkpoint(draft, found), draft.run.target
    origin = {
        **{key: found.state[key] for key in ("step", "samples_seen", "plugins")},
        "target": target.path,
        "target_fingerprint": target.fingerprint(),
        "algorithm": found.state["config"]["algorithm"],
        "chat_template": found.state["data"].get("chat_template", ""),
    }
    public = json.loads(re.sub(r'"((?:editable: )?)((?:[^"\\]|\\.)*)"', named, json.dumps(origin)))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            (partial := Path(beside, "export")).mkdir()
            hook, options = draft.algorithm.hook, draft.options
            hook.export_draft(draft=built, folder=partial, layout=layout, options=options)
            files, manifest = [f for f in partial.rglob("*") if f.is_file()], partial / EXPORT
            digests = {file.relative_to(partial).as_posix(): digest(file) for file in files}
            write_sealed(manifest, {**public, "files": digests})
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
