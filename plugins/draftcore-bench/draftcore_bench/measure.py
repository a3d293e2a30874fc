"""Measure servers side by side: the same prompts, in turn, with more and more requests at once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftcore.errors import DraftcoreError
from draftcore.progress import Progress
from draftcore_bench.drafts import Drafts, counted
from draftcore_bench.prompts import Prompt
from draftcore_bench.server import Answer, Failure, Server

WARM_TOKENS = 16  # of an answer that is not counted
OTHERS = 1.05  # times the tokens of our answers that a server made: somebody else asks it, too


@dataclass
class Round:
    """All prompts answered by one server, some at a time. `drafts` are those of its answers.

    `busy` is the share of the time in which this process worked; `others` says that somebody else asked.
    """

    side: str
    concurrency: int
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    drafts: Drafts | None = None
    busy: float = 0.0
    others: bool = False

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def drafted_for(self) -> int:
        return sum(answer.drafted_for for answer in self.answers)


async def measure(
    sides: Mapping[str, Server], prompts: Sequence[Prompt], levels: Sequence[int], repeats: int,
    sampling: Mapping[str, Any], progress: Progress,
) -> AsyncIterator[Round]:  # fmt: skip
    """Yield each round. The sides take turns, and who begins changes, so that what drifts favours none.

    Before a level each side answers as many requests uncounted. Raises DraftcoreError where one answers
    none.
    """
    done = 0
    warm = {**sampling, "max_tokens": min(WARM_TOKENS, sampling["max_tokens"])}
    for level in levels:
        asked = repeated(prompts, level)
        for side, server in sides.items():
            await run(server, Round(side, level), asked[:level], warm)
        for repeat in range(repeats):
            for side, server in list(sides.items())[:: -1 if repeat % 2 else 1]:
                yield await run(server, Round(side, level), asked, sampling)
                progress.show(done := done + 1)


def repeated(prompts: Sequence[Prompt], level: int) -> list[Prompt]:
    """Return all prompts as often as two requests of each of so many tasks take: the end is then short."""
    return [*prompts] * -(-2 * level // len(prompts))


async def run(
    server: Server, made: Round, prompts: Sequence[Prompt], sampling: Mapping[str, Any]
) -> Round:
    """Have prompts answered, as many at once as the round says, and count what is told of them."""
    waiting, salt = enumerate(prompts), uuid.uuid4().hex

    async def ask() -> None:
        for number, prompt in waiting:
            try:
                made.answers.append(await server.ask(prompt, f"{salt}-{number}", sampling))
            except Failure as failure:
                made.failures[f"{made.side}: {failure}"] += 1

    before = await server.counters()
    began, worked = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask() for _ in range(made.concurrency)))
    made.seconds = time.perf_counter() - began
    made.busy = (time.process_time() - worked) / made.seconds
    if not made.answers:
        (reason, _), *_ = made.failures.most_common(1)
        raise DraftcoreError(f"{server.url} answers no request: {reason}\n  look at its log")
    grew = await server.counters() - before
    told = [answer.drafts for answer in made.answers if answer.drafts is not None]
    if told:
        for answer in made.answers:  # one that tells nothing was not drafted for
            answer.drafts = answer.drafts or Drafts()
        made.drafts = sum(told, Drafts())
    elif not made.failures:  # counters have also what those made that failed
        made.drafts = counted(grew, made.drafted_for)
    made.others = not made.failures and grew["made"] > OTHERS * made.tokens
    return made
