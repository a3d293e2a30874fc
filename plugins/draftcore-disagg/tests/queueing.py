"""What the tests of queue, producer and loader share."""

from __future__ import annotations

import json

from draftcore_disagg.channel import Json, Task
from draftcore_disagg.queue import Queue, QueueService

from draftcore.contracts.capture import CaptureBatch

SOON = 60.0  # seconds in which what must happen does, however slow the machine
LENGTH = 3


def task(position: int, nbytes: int = 10, index: int | None = None) -> Task:
    """The task at a position: batch `index`, of the rows 2 x index and the next one."""
    index = position if index is None else index
    rows = (2 * index, 2 * index + 1)
    ids, tokens = tuple(f"s{row}" for row in rows), tuple([row] * LENGTH for row in rows)
    batch = CaptureBatch(index, rows, ids, tokens)
    return Task(position, batch, ([True, False, True],) * 2, nbytes)


class Loopback:
    """A channel's client in the same process, which notes what is asked; what passes is JSON."""

    def __init__(self, queue: Queue) -> None:
        self.service = QueueService(queue)
        self.said: list[Json] = []

    def call(self, request: Json) -> Json:
        self.said.append(request)
        answer = self.service.answer(json.loads(json.dumps(request)))
        reply: Json = json.loads(json.dumps(answer, allow_nan=False))
        return reply

    def close(self) -> None: ...

    def of(self, call: str) -> list[Json]:
        return [one for one in self.said if one["call"] == call]
