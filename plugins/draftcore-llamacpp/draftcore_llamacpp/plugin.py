"""The hooks of the engine `llamacpp` and the verb `gguf`. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    import click
    from draftcore_eval.engines import Engine, Serving

    from draftcore_llamacpp.options import LlamaCppOptions


@hookimpl
def describe() -> Sequence[Offer]:
    install = {"xllamacpp": "pip install 'draftcore-llamacpp[serve]'"}
    options = "draftcore_llamacpp.options:LlamaCppOptions"
    return [Offer("engine", "llamacpp", options=options, needs=install)]


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore_llamacpp.verb import verb

    return [verb]


@hookimpl
def engine(name: str, serving: Serving, options: LlamaCppOptions) -> Engine:
    from draftcore_llamacpp.engine import LlamaCpp

    return LlamaCpp(serving, options)
