"""The verb `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftcore_llamacpp.api import gguf

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="gguf", epilog="For example: draftcore gguf run.yaml --out draft.gguf")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--out", type=FILE, required=True, help="The file to write.")
@click.option(
    "--type", "kind", type=click.Choice(["f32", "f16", "bf16", "q8_0"]), default="f32",
    show_default=True, help="Of matrices; vectors are f32.",
)  # fmt: skip
@click.option("--target", is_flag=True, help="Write the target in place of the draft.")
@click.option("--draft", help="One of the run's `drafts`.")
@click.option(
    "--export", "exported", type=FOLDER, help="An export; RUN[/DRAFT]/export if not given."
)
@click.option("--tokenizer", type=FILE, help="Take the tokenizer of this GGUF file of the target.")
@click.pass_obj
def verb(registry: Any, /, config: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Write an exported draft as GGUF, which llama.cpp serves.

    What llama.cpp would serve otherwise than it was trained is refused. A small Qwen3 target is written
    as well; llama.cpp has a converter for others.
    """
    gguf(config, *overrides, **options, registry=registry, say=click.echo)
