"""The hooks of the evaluation `decoding` and of the runner `eager`. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    import click

    from draftcore.contracts.run import Evaluation, OpenRun
    from draftcore.contracts.runner import Runner
    from draftcore_eval.options import EvalOptions


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("evaluation", "decoding", options="draftcore_eval.options:EvalOptions"),
        Offer("runner", "eager"),
    ]


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore_eval.verb import served, verb

    return [verb, served]


@hookimpl
def evaluation(name: str, run: OpenRun, options: EvalOptions) -> Evaluation:
    from draftcore_eval.evaluation import Decoding

    return Decoding(run, options)


@hookimpl
def runner(name: str) -> Runner:
    from draftcore_eval.decode import Eager

    return Eager()
