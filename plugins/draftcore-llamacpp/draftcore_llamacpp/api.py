"""The verb `gguf` as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import open_run
from draftcore.errors import UsageError
from draftcore.files import EXPORT, read_sealed

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore.options import Config


def gguf(
    config: Config, *overrides: str, out: Path, kind: str = "f32", target: bool = False,
    draft: str | None = None, exported: Path | None = None, tokenizer: Path | None = None,
    registry: Any = None, say: Callable[[str], object] = print,
) -> Path:  # fmt: skip
    """Write a run's exported draft, or its `target`, as a GGUF file for llama.cpp; returns the file.

    `kind` is the type of its matrices; `tokenizer` is a GGUF file of the target to take the tokenizer from.
    Raises UsageError for what llama.cpp would serve otherwise than it was trained.
    """
    from draftcore_eval.served import folder_of  # which imports torch, as the next does

    from draftcore_llamacpp.convert import write_draft, write_target

    with open_run(config, overrides, registry) as run:
        folder = folder_of(run)
        if target:
            write_target(folder, out, kind)
            say(f"{'target':28}  {size(out)}")
            return out
        chosen = run.chosen(draft)
        if len(chosen) > 1:
            labels = ", ".join(one.label for one in chosen)
            raise UsageError(f"the run has several drafts: {labels}\n  choose one with --draft")
        export = exported or chosen[0].folder / "export"
        if not (export / "config.json").is_file():
            raise UsageError(f"no export lies in {export}\n  run `draftcore export` first")
        require_same_target(export, run.target)
        converted = write_draft(export, folder, out, kind, tokenizer)
    say(f"{'draft':28}  {size(out)}")
    number = converted.num_drafts or getattr(chosen[0].options, "num_drafts", None) or 3
    say(f"to serve with llama.cpp:\n  {converted.command('target.gguf', out, number)}")
    return out


def require_same_target(export: Path, target: TargetSpec) -> None:
    """Raise UsageError for an export of another target: llama.cpp compares no more than sizes."""
    try:
        trained = read_sealed(export / EXPORT)["target_fingerprint"]
    except (OSError, ValueError, KeyError):
        return  # one from elsewhere, or altered, which its conversion says
    if (now := target.fingerprint()) != trained:
        raise UsageError(
            f"the draft in {export} was trained for another target: its fingerprint is {trained}, and "
            f"that of {target.path} {now}\n  name the target that it was trained for"
        )


def size(file: Path) -> str:
    return f"{file} ({file.stat().st_size / (1 << 20):.1f} MiB)"
