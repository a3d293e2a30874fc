"""The verbs of `data` as functions: `show`, `check`, `regenerate`. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import load_plugins, open_run
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.contracts.run import OpenRun
    from draftcore.options import Config
    from draftcore_data.check import Verdict
    from draftcore_data.dataset import Dataset
    from draftcore_data.regenerate import Job
    from draftcore_data.show import Row


@dataclass(frozen=True)
class Shown:
    """Rows as they will be learned, and figures over all of them."""

    figures: dict[str, Any]
    rows: list[Row]


def show(config: Config, *overrides: str, rows: int = 3, registry: Any = None) -> Shown:
    """Return rows of a run as they will be learned, and figures over all of them."""
    with rendered(config, overrides, registry) as (run, dataset):
        from draftcore_data.show import figures, rows_of

        found = figures(run, dataset)
        shown = rows_of(dataset, run.target.load_tokenizer(), range(min(rows, found["kept"])))
        return Shown(found, list(shown))


def check(
    config: Config, *overrides: str, rows: int = 32, max_tokens: int = 128, registry: Any = None
) -> Verdict:
    """Judge whether the answers of a run's data are the target's own: `own`, `near` or `foreign`."""
    with rendered(config, overrides, registry) as (run, dataset):
        from draftcore_data.check import check_answers

        return check_answers(dataset, run.target.load_model(), rows, max_tokens)


@contextmanager
def rendered(
    config: Config, overrides: Sequence[str], registry: Any
) -> Iterator[tuple[OpenRun, Dataset]]:
    """Open a run with its training data, rendered."""
    from draftcore_data.rows import Conversations

    with open_run(config, overrides, registry) as run:
        if not isinstance(run.data, Conversations):
            raise UsageError(
                f"data.name={run.config.data.name} reads no conversations, which are what is "
                "rendered here\n  give a run of conversations: leave data.name out"
            )
        yield run, run.data.samples("train")


def regenerate(
    source: Config, *overrides: str, out: str | Path, endpoints: Sequence[str] = (),
    in_process: bool = False, model: str | None = None, concurrency: int | None = None,
    rows: int | None = None, max_tokens: int = 2048, timeout: float = 600.0,
    patience: float = 600.0, registry: Any = None, **sampling: Any,
) -> Job:  # fmt: skip
    """Have the target answer the conversations of a run or a source anew; returns what was done.

    `sampling` is what the verb's options are called: `temperature`, `top_p`, `seed`, `reasoning_effort`.
    Rows that `failed` are asked for again by the same call.
    """
    given = {key: value for key, value in sampling.items() if value is not None}
    if endpoints and in_process:
        raise UsageError("who answers?\n  give --endpoint URL, one or more, or --in-process")
    if in_process and given:
        raise UsageError(
            f"in process answers are greedy: {', '.join(sorted(given))} cannot be set\n"
            "  leave it out, or ask a server: --endpoint"
        )
    from draftcore_data.endpoints import Endpoints
    from draftcore_data.regenerate import Questions, from_servers, from_target

    given["max_tokens"] = max_tokens
    questions = Questions.read(source, overrides, rows, given, registry or load_plugins())
    if in_process:
        return from_target(questions, Path(out), concurrency or 32)
    if not endpoints:
        remedy = "give --endpoint URL, one or more, or --in-process"
        raise UsageError(f"who answers?\n  {remedy}\n{questions.who_answers()}")
    servers = Endpoints(endpoints, timeout, patience, concurrency, questions.who_answers)
    return from_servers(questions, Path(out), servers, model)
