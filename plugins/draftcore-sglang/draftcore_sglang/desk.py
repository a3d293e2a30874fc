"""Which requests of a scheduler ask for a capture, and what each is answered.

The desk lives in the scheduler's process and knows nothing of sglang: a request is its id, its ask
and its length. A prompt may pass in several forwards (chunked prefill); its rows are collected, and
what does not begin at its first token, or leaves a gap, is refused: a cached prefix has no states.
A request whose capture is being written is `held`: sglang is done with it, and its answer leaves
when the receipt is there. Nothing here waits.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftcore_sglang.sink import Job, Part, Writer
from draftcore_sglang.wire import FAILED, FIELD, REFUSED, SHORT, Ask, Refusal

MAX_PROMPTS = 4096  # that are only half prefilled; those of aborted requests are dropped


@dataclass(frozen=True)
class Slice:
    """A request's share of one forward: rows [first, first + rows) of its batch's states.

    `start` is the position in the prompt of the first row; `last` says that the prompt ends here.
    """

    rid: str
    field: Any  # what the client wrote
    prompt: int
    start: int
    first: int
    rows: int
    last: bool
    new_tokens: int


@dataclass
class Prompt:
    parts: list[Part] = field(default_factory=list)
    rows: int = 0


class Desk:
    """Takes states in and gives receipts out, by request id. Used by one thread, the scheduler's."""

    def __init__(self, writer: Writer, about: Mapping[str, Any], names: Sequence[str]) -> None:
        self.writer, self.about, self.names = writer, about, frozenset(names)
        self.problem = ""  # why nothing can be captured here
        self.held: dict[str, Any] = {}  # request id: what the caller keeps for it
        self._prompts: dict[str, Prompt] = {}
        self._done: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def take(self, part: Slice, states: Mapping[str, Tensor] | None, ready: Any) -> Any:
        """Take a request's share of a forward; returns its receipt, or None while there is none.

        A request that becomes held is in `held` until `receipts` gives out its receipt.
        """
        try:
            if isinstance(part.field, dict) and part.field.get("about") is True:
                return {"about": {**self.about, "problem": self.problem}}
            return self._take(part, Ask.from_json(part.field), states, ready)
        except Refusal as refusal:
            return self._refuse(part.rid, refusal)
        except Exception as error:
            return self._refuse(part.rid, Refusal(FAILED, f"{type(error).__name__}: {error}"))

    def fail(self, part: Slice, error: Exception) -> Any:
        return self._refuse(part.rid, Refusal(FAILED, f"{type(error).__name__}: {error}"))

    def receipts(self) -> list[tuple[Any, dict[str, Any]]]:
        """What was held and has its receipt now."""
        found = []
        while not self._done.empty():
            rid, receipt = self._done.get()
            found.append((self.held.pop(rid), receipt))
        return found

    def _take(self, part: Slice, ask: Ask, states: Mapping[str, Tensor] | None, ready: Any) -> Any:
        self._require(part, ask, states)
        assert states is not None
        prompt = self._prompts.setdefault(part.rid, Prompt())
        if part.start == 0:  # also where a request was retracted, and begins anew
            prompt.parts, prompt.rows = [], 0
        if part.start != prompt.rows:
            raise Refusal(
                SHORT,
                f"{part.start - prompt.rows} of {part.prompt} tokens came from the prefix cache: "
                "send a cache_salt or extra_key of its own with each request",
            )
        end = part.first + part.rows
        prompt.parts.append(
            Part({name: states[name][part.first : end] for name in ask.names}, ready)
        )
        prompt.rows += part.rows
        if not part.last:
            return None
        del self._prompts[part.rid]
        if prompt.rows != part.prompt:
            raise Refusal(SHORT, f"{prompt.rows} rows of states for {part.prompt} tokens")
        rid = part.rid
        self.held[rid] = None
        try:
            self.writer.take(
                Job(ask, part.prompt, prompt.parts, lambda receipt: self._done.put((rid, receipt)))
            )
        except BaseException:
            del self.held[rid]
            raise
        return None

    def _require(self, part: Slice, ask: Ask, states: Mapping[str, Tensor] | None) -> None:
        if self.problem:
            raise Refusal(REFUSED, self.problem)
        if lacking := sorted(set(ask.names) - self.names):
            raise Refusal(
                REFUSED,
                f"this server captures {', '.join(sorted(self.names))}, not {', '.join(lacking)}",
            )
        if part.new_tokens != 1:
            raise Refusal(REFUSED, "a request that captures must set max_new_tokens=1")
        if states is None or (absent := sorted(set(ask.names) - states.keys())):
            what = "states" if states is None else ", ".join(absent)
            raise Refusal(FAILED, f"the forward left no {what}")
        if len(self._prompts) > MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def _refuse(self, rid: str, refusal: Refusal) -> dict[str, Any]:
        self._prompts.pop(rid, None)
        return refusal.receipt


def receipt_field(receipt: dict[str, Any]) -> dict[str, list[Any]]:
    """Return a receipt as sglang's customized info: one value for each new token, and there is one."""
    return {FIELD: [receipt]}
