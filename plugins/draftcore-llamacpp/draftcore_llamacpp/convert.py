"""Write an exported draft, or a small target, as a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftcore_nn import serving

from draftcore.errors import UsageError
from draftcore.files import require_exported
from draftcore_llamacpp import target as targets
from draftcore_llamacpp.files import write_gguf
from draftcore_llamacpp.methods import Method, draft_keys, draft_tensors, method_of


@dataclass(frozen=True)
class Converted:
    """A draft's file: how llama.cpp drafts with it, and how many tokens a round must have, if it says."""

    method: Method
    num_drafts: int | None

    def command(self, target: str, draft: object, num_drafts: int) -> str:
        """Return what serves it by hand, beside the target's file."""
        draft = f"-md {draft} --spec-type draft-{self.method.served_as or self.method.name}"
        return f"llama-server -m {target} {draft} --spec-draft-n-max {num_drafts}"


def write_draft(
    export: Path, target: Path, file: Path, kind: str = "f32", tokenizer: Path | None = None
) -> Converted:
    """Write an export; `tokenizer` is a GGUF file of the target that has it, if it is not made here.

    Raises UsageError for a draft that llama.cpp would serve otherwise than it was trained, or of another
    target; DraftcoreError for an export that was altered, and where the file cannot be written.
    """
    require_exported(export)
    config, text = serving.read_config(export), targets.text_config(target)
    method = method_of(config, export)
    wide = config.get("target_hidden_size") or config.get("hidden_size")
    sizes = {"vocab_size": config.get("vocab_size"), "hidden_size": wide}
    for name, ours in sizes.items():
        if ours != text[name]:
            raise UsageError(
                f"the draft in {export} is for a target of {name} {ours}, and that in {target} has "
                f"{text[name]}\n  use the draft with the target it was trained for"
            )
    keys = draft_keys(method, config, export, int(text["num_hidden_layers"]))
    keys = {**targets.tokenizer_keys(target, tokenizer, int(text["vocab_size"])), **keys}
    write_gguf(file, method.name, keys, draft_tensors(method, config, export), kind)
    return Converted(method, method.num_drafts(config))


def write_target(target: Path, file: Path, kind: str = "f32") -> None:
    """Write a small Qwen3; raises UsageError, with the command of llama.cpp's converter, for others."""
    keys = targets.target_keys(target, kind)
    write_gguf(file, "qwen3", keys, targets.target_tensors(target), kind)
