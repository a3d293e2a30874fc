"""Answers made by the target, one line of JSON for each conversation: `draftcore data regenerate`.

The file of answers is only ever appended to. A line holds the row's id, so a run that was killed goes on
with what is not there yet; a last line that was torn is dropped. A row that fails is listed beside
the file and is asked again by the same command.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from draftcore import bind, load_config
from draftcore.contracts.capture import RowError
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError, one_line
from draftcore.files import hold, regular, write_atomic
from draftcore.options import Config
from draftcore.progress import Progress
from draftcore_data.conversations import BadRow, Conversation, Message, Rendered, Row
from draftcore_data.conversing import Answer, converse
from draftcore_data.endpoints import Endpoints
from draftcore_data.options import DataOptions, Sources
from draftcore_data.servers import server_lines
from draftcore_data.sources import Find, finder, named, read_conversations, require_columns

EVERY = 30.0  # seconds between the lines of a run that is not on a terminal
Rows = Callable[[], Iterable[Row]]
Ended = list[Message] | RowError


def row_id(row: Conversation) -> str:
    """Return a row's place with a digest of what it says, by which a file of answers knows it."""
    said = json.dumps([row.messages, row.tools], sort_keys=True).encode()
    return f"{row.where}:{hashlib.blake2b(said, digest_size=8).hexdigest()}"


def failures_of(out: Path) -> Path:
    """Return the file that lists what has no answer, beside the file of answers."""
    return out.with_name(out.name + ".failed.jsonl")


@dataclass(frozen=True)
class AnswersFile:
    """The answers that are there, by their rows' ids, and the file that lists what has none."""

    ids: set[str]
    stream: BinaryIO
    failures: BinaryIO

    def add(self, row: Conversation, messages: list[Message]) -> None:
        """Append a finished conversation; the line is the system's when this returns."""
        line = {"id": row_id(row), "messages": messages}
        append(self.stream, {**line, "tools": row.tools} if row.tools else line)

    def add_failure(self, row: BadRow) -> None:
        append(self.failures, row._asdict())


def append(stream: BinaryIO, line: Mapping[str, Any]) -> None:
    stream.write(json.dumps(line).encode() + b"\n")
    stream.flush()


@contextmanager
def open_answers(path: Path, settings: Mapping[str, Any]) -> Iterator[AnswersFile]:
    """Hold a file of answers against other processes; `settings` say how all of them are made.

    Raises UsageError for a file of other settings, or one that holds something else.
    """
    lock = hold(
        path.with_name(path.name + ".lock"), f"writes to {path}", "name another file with --out"
    )
    try:
        about, failed = path.with_name(path.name + ".settings.json"), failures_of(path)
        there = regular(path).exists() and about.exists()
        then = json.loads(regular(about).read_text()) if there else settings
        if differ := [key for key in {**settings, **then} if settings.get(key) != then.get(key)]:
            told = (f"  {k}: {then.get(k)!r} there, {settings.get(k)!r} now\n" for k in differ)
            raise UsageError(
                f"{path} holds answers that were made otherwise\n{''.join(told)}"
                "  give the settings that are there, or name another file with --out"
            )
        with open(path, "a+b") as stream:
            ids = read_ids(path, stream)
            write_atomic(about, json.dumps(dict(settings), indent=1))
            with open(regular(failed), "wb") as failures:
                yield AnswersFile(ids, stream, failures)
            os.fsync(stream.fileno())
        if not failed.stat().st_size:
            failed.unlink()
    finally:
        os.close(lock)


def read_ids(path: Path, stream: BinaryIO) -> set[str]:
    """Return the ids of the rows that have answers, and drop a last line that was torn."""
    ids, whole = set[str](), 0
    stream.seek(0)
    for number, line in enumerate(stream, start=1):
        if line.endswith(b"\n"):
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{path}:{number} is no answer that was written here\n"
                    "  correct or delete the line, or name another file with --out"
                ) from None
            whole += len(line)
    stream.truncate(whole)
    return ids


class Job:
    """The rows that lack an answer, what is done with each answer and each end, and their numbers."""

    def __init__(self, rows: Rows, out: AnswersFile) -> None:
        self.out, self._rows = out, rows
        self.bad = self.done = self.failed = self.cut = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.began = self._told = time.monotonic()
        ids = set[str]()  # a source's weight may give a row twice, which is answered once
        for row in rows():
            if isinstance(row, Rendered):
                row = BadRow(row.where, "a row of tokens asks nothing that could be asked anew")
            elif isinstance(row, Conversation) and row.images:
                row = BadRow(row.where, "it asks about images, and here text alone is asked")
            if isinstance(row, BadRow):
                self.bad += 1
                out.add_failure(row)
            else:
                ids.add(row_id(row))
        self.total, self.before = len(ids), len(ids & out.ids)
        self.progress = Progress(self.total, self.before, "answering", status_line=self.text)

    def rows(self) -> Iterator[Conversation]:
        begun = set(self.out.ids)
        for row in self._rows():
            if not isinstance(row, Conversation) or row.images:
                continue
            if (one := row_id(row)) not in begun:
                begun.add(one)
                yield row

    def ended(self, row: Conversation, how: Ended) -> None:
        """Write a row's new conversation, or why there is none, and show how far the work is."""
        if isinstance(how, RowError):
            self.failed += 1
            self.out.add_failure(BadRow(row.where, *how.args))
        else:
            self.out.add(row, how)
            self.done += 1
        at = self.before + self.done + self.failed
        self.progress.update(self.progress.task, completed=at)
        if not self.progress.console.is_terminal and time.monotonic() - self._told > EVERY:
            self.progress.tell(f"answering {at}/{self.total}  {self.text()}")
            self._told = time.monotonic()

    def count(self, answer: Answer) -> None:
        self.cut += answer.finish == "length"
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens

    def text(self) -> str:
        """Return rate, time left and tokens on a line."""
        seconds = max(time.monotonic() - self.began, 1e-3)
        ended = self.done + self.failed
        left = (self.total - self.before - ended) * seconds / max(ended, 1)
        parts = [
            f"{3600 * ended / seconds:,.0f} rows an hour",
            *([f"{timedelta(seconds=int(left))} left"] if ended else ()),
            f"{self.completion_tokens / seconds:,.0f} tokens/s",
            *([f"{self.failed} failed"] if self.failed else ()),
            f"{self.prompt_tokens:,} tokens in, {self.completion_tokens:,} out",
        ]
        return "  ".join(parts)

    def summary(self, out: Path) -> list[str]:
        """Return what a person needs to know at the end."""
        failed = failures_of(out)
        lines = [
            f"{out}: answers to {self.before + self.done:,} of {self.total:,} rows, "
            f"{self.done:,} of them made now",
            f"  {self.prompt_tokens:,} tokens in, {self.completion_tokens:,} out",
        ]
        if self.cut:
            lines.append(f"  {self.cut:,} answers were cut: raise --max-tokens to have them whole")
        if self.bad:
            lines.append(f"  {self.bad:,} rows of the source cannot be used, listed in {failed}")
        if self.failed:
            lines.append(f"  {self.failed:,} rows failed, listed in {failed}")
            lines.append("  the same command asks for them again")
        return lines


async def ask_servers(job: Job, endpoints: Endpoints) -> None:
    """Take the rows through their conversations, as many at a time as servers may have questions."""
    rows = job.rows()

    async def work() -> None:
        for row in rows:  # one iterator for all: each takes the next row
            talk = converse(row)
            try:
                asked = next(talk)
                while True:
                    answer = await endpoints.answer(asked, row.tools)
                    job.count(answer)
                    asked = talk.send(answer)
            except StopIteration as end:
                job.ended(row, end.value)
            except RowError as error:
                job.ended(row, error)

    await asyncio.gather(*(work() for _ in range(endpoints.under_way)))


@dataclass(frozen=True)
class Questions:
    """What is to be answered, and how: a source's rows, the run they are of, what is asked with."""

    source: Sources
    options: DataOptions
    limit: int | None
    sampling: Mapping[str, Any]
    find: Find
    open_target: Callable[[], TargetSpec] | None = None  # of the run

    @classmethod
    def read(
        cls, source: Config, overrides: Sequence[str], limit: int | None, sampling: Mapping[str, Any],
        registry: Any,
    ) -> Questions:  # fmt: skip
        """Take a run's YAML with overrides, or else a source of conversations by itself."""

        find = finder(functools.partial(bind, registry))
        if not isinstance(source, Mapping) and Path(source).suffix not in (".yaml", ".yml"):
            if overrides:
                raise UsageError(
                    f"{overrides[0]!r} belongs to a run, and {source} is none\n"
                    "  give a run's YAML file in its place, or leave that out"
                )
            return cls(str(source), DataOptions(), limit, sampling, find)
        settings = load_config(source, overrides)
        data, target = settings.data, settings.target
        options = bind(registry, "samples", data.name, data.options, (), data.plugin).options
        if not isinstance(options, DataOptions):
            raise UsageError(
                f"data.name={data.name} reads no conversations that could be answered anew\n"
                "  give a run of conversations: leave data.name out"
            )
        if options.train is None:
            raise UsageError("data.train is not set\n  set it to conversations in JSONL")
        bound = bind(registry, "target", target.name, target.options, (), target.plugin)
        open_target = functools.partial(bound.hook.target, name=target.name, options=bound.options)
        limit = limit or options.limit
        return cls(options.train, options, limit, sampling, find, open_target)

    def who_answers(self, port: int = 8000) -> str:
        """Say how a server of the run's target is started; a source alone names no target."""
        if self.open_target is None:
            return "  for the command that starts a server, give a run's YAML file: it names the target"
        try:
            target = self.open_target()
            lines = server_lines(target, self.options.chat_template, port)
        except (DraftcoreError, OSError) as error:
            return f"  how a server of the run's target is started is not known: {one_line(error)}"
        return "\n    ".join([f"  one of these serves {target.path}:", *lines])

    @contextmanager
    def open(self, out: Path, settings: Mapping[str, Any]) -> Iterator[Job]:
        """Open the file of answers, and the rows that it lacks, for as long as they are answered."""
        told = self.options.template_options
        about = {**settings, **self.sampling, "template_options": told}
        with open_answers(out, about) as answers:
            columns = self.options.columns
            require_columns(self.source, columns, self.find)
            job = Job(
                lambda: read_conversations(self.source, self.limit, self.find, columns), answers
            )
            if not job.total:
                raise UsageError(
                    f"no row of {named(self.source)} can be answered\n"
                    f"  they are listed in {failures_of(out)}"
                )
            with job.progress:
                yield job


def from_servers(questions: Questions, out: Path, endpoints: Endpoints, model: str | None) -> Job:
    """Have servers answer with the model of this name, or the only one that they have."""

    async def ask() -> Job:
        async with endpoints:
            name = model or await endpoints.find_model()
            endpoints.body |= {"model": name, **questions.sampling}
            if told := questions.options.template_options:
                endpoints.body["chat_template_kwargs"] = told
            with questions.open(out, {"model": name}) as job:
                await ask_servers(job, endpoints)
            return job

    return asyncio.run(ask())


def from_target(questions: Questions, out: Path, batch: int) -> Job:
    """Have the run's target answer in this process."""
    from draftcore_data.local import answer_here
    from draftcore_data.rendering import Renderer

    if questions.open_target is None:
        raise UsageError(
            f"{named(questions.source)} names no target to answer in this process\n"
            "  give a run's YAML file, or ask a server: --endpoint"
        )
    target = questions.open_target()
    renderer = Renderer(target.load_tokenizer(), questions.options)
    with questions.open(out, {"model": target.path, "in_process": True}) as job:
        given = target.load_model(), renderer, batch, questions.sampling["max_tokens"]
        answer_here(*given, job.rows(), job.count, job.ended)
    return job
