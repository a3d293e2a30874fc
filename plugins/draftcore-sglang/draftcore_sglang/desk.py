"""Which requests of a scheduler ask for a capture, and what each is answered.

The desk lives in the scheduler's process and knows nothing of sglang: a request is its id, its ask
and its length. A prompt may pass in several forwards (chunked prefill); its rows are collected, and
what does not begin at its first token, or leaves a gap, is refused: a cached prefix has no states.
A request whose capture is being written is `held`: sglang is done with it, and its answer leaves
when the receipt is there. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftcore.uris import format_size
from draftcore_sglang.sink import Block, Sink
from draftcore_sglang.wire import FAILED, FIELD, REFUSED, SHORT, Ask, Refusal
from draftcore_sglang.writer import Job, Place, Receipt, refusal_of


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


@dataclass(frozen=True)
class _Rows:
    """A request's rows of a forward, by feature, and the block that they lie in."""

    block: Block
    places: Mapping[str, Place]


@dataclass
class _Prompt:
    """What is here of a prompt that passes in several forwards, or why nothing will be."""

    parts: list[_Rows] = field(default_factory=list)
    rows: int = 0
    refusal: Refusal | None = None


class Desk:
    """Takes states in and gives receipts out, by request id. Used by one thread, the scheduler's.

    `problem` says why nothing can be captured here; only then may there be no sink.
    """

    def __init__(
        self, sink: Sink | None, about: Mapping[str, Any], names: Sequence[str], problem: str = ""
    ) -> None:
        self.about, self.names, self.problem = about, frozenset(names), problem
        self._sink = sink
        self.held: dict[str, Any] = {}  # request id: what the caller keeps for it
        self._prompts: dict[str, _Prompt] = {}

    def take(
        self, shares: Sequence[Slice], states: Mapping[str, Tensor] | None, ready: Any
    ) -> dict[str, Receipt]:
        """Take the shares of a forward; returns, by request id, the receipts that are there at once.

        A request that becomes held is in `held` until `receipts` gives out its receipt.
        """
        answers: dict[str, Receipt] = {}
        wanted: list[tuple[Slice, Ask]] = []
        for share in shares:
            try:
                if isinstance(share.field, dict) and share.field.get("about") is True:
                    answers[share.rid] = {"about": {**self.about, "problem": self.problem}}
                    continue
                ask = Ask.from_json(share.field)
                self._require(share, ask, states)
                wanted.append((share, ask))
            except Exception as error:
                answers[share.rid] = self._refuse(share, error)
        if wanted and states is not None:
            jobs = dict[str, tuple[Job, Sequence[Block]]]()
            for share, ask, rows in self._stage(wanted, states, ready):
                if isinstance(rows, Refusal):
                    answers[share.rid] = self._refuse(share, rows)
                elif job := self._add(share, ask, rows):
                    jobs[share.rid] = job
            try:
                self.sink.send(jobs)
                self.held |= dict.fromkeys(jobs)
            except OSError as error:  # no writer can be started
                for rid, (_, blocks) in jobs.items():
                    self.sink.release(blocks)
                    answers[rid] = refusal_of(error).receipt
        return answers

    @property
    def sink(self) -> Sink:
        assert self._sink is not None
        return self._sink

    def receipts(self) -> list[tuple[Any, Receipt]]:
        """What was held and has its receipt now."""
        return [(self.held.pop(rid), receipt) for rid, receipt in self.sink.receipts().items()]

    def _require(self, share: Slice, ask: Ask, states: Mapping[str, Tensor] | None) -> None:
        if self.problem:
            raise Refusal(REFUSED, self.problem)
        if lacking := sorted(set(ask.names) - self.names):
            raise Refusal(
                REFUSED,
                f"this server captures {', '.join(sorted(self.names))}, not {', '.join(lacking)}",
            )
        if share.new_tokens != 1:
            raise Refusal(REFUSED, "a request that captures must set max_new_tokens=1")
        if states is None or (absent := sorted(set(ask.names) - states.keys())):
            what = "states" if states is None else ", ".join(absent)
            raise Refusal(FAILED, f"the forward left no {what}")
        self._require_room(share, sum(_row_bytes(states[name]) for name in ask.names))
        self._require_next(share)

    def _require_room(self, share: Slice, row_bytes: int) -> None:
        """Refuse a prompt for which there will never be room."""
        if share.prompt * row_bytes > self.sink.max_bytes // 2:  # blocks leave gaps
            raise Refusal(
                REFUSED,
                f"{share.prompt} tokens have {format_size(share.prompt * row_bytes)} of states, and a "
                f"prompt gets half of DRAFTCORE_BUFFER={format_size(self.sink.max_bytes)}",
            )

    def _require_next(self, share: Slice) -> None:
        """Refuse rows that do not follow those that are here, and a last share that is short.

        The rest of a prompt is refused for the reason of its first rows.
        """
        if share.start == 0:  # also where a request was retracted, and begins anew
            self._forget(share.rid)
        prompt = self._prompts.get(share.rid, _Prompt())
        if prompt.refusal is not None:
            raise prompt.refusal
        rows = prompt.rows
        if share.start != rows:
            raise Refusal(
                SHORT,
                f"{share.start - rows} of {share.prompt} tokens came from the prefix cache: "
                "send a cache_salt or extra_key of its own with each request",
            )
        if share.last and rows + share.rows != share.prompt:
            raise Refusal(SHORT, f"{rows + share.rows} rows of states for {share.prompt} tokens")

    def _stage(
        self, wanted: Sequence[tuple[Slice, Ask]], states: Mapping[str, Tensor], ready: Any
    ) -> Iterator[tuple[Slice, Ask, _Rows | Refusal]]:
        """Copy all that is wanted in one block; where that is too much, each request's rows alone."""
        try:
            yield from self._copied(wanted, states, ready)
            return
        except Refusal:
            self._forget_aborted({share.rid for share, _ in wanted})
        for one in wanted:
            try:
                yield from self._copied([one], states, ready)
            except Refusal as refusal:
                yield (*one, refusal)

    def _copied(
        self, wanted: Sequence[tuple[Slice, Ask]], states: Mapping[str, Tensor], ready: Any
    ) -> list[tuple[Slice, Ask, _Rows]]:
        """Copy the rows from the first to the last that is wanted, as one block."""
        first = min(share.first for share, _ in wanted)
        end = max(share.first + share.rows for share, _ in wanted)
        names = [name for name in states if any(name in ask.names for _, ask in wanted)]
        block = self.sink.stage({name: states[name][first:end] for name in names}, ready)
        block.users = len(wanted)
        return [
            (share, ask, _Rows(block, block.part(ask.names, share.first - first, share.rows)))
            for share, ask in wanted
        ]

    def _add(self, share: Slice, ask: Ask, rows: _Rows) -> tuple[Job, Sequence[Block]] | None:
        """Add rows to their prompt; returns it as a job where it is whole."""
        prompt = self._prompts.setdefault(share.rid, _Prompt())
        prompt.parts.append(rows)
        prompt.rows += share.rows
        if not share.last:
            return None
        del self._prompts[share.rid]
        parts = [part.places for part in prompt.parts]
        job = Job(share.rid, ask, share.prompt, parts)
        return job, [part.block for part in prompt.parts]

    def _refuse(self, share: Slice, error: Exception) -> Receipt:
        self._forget(share.rid)
        refusal = refusal_of(error)
        if not share.last:
            self._prompts[share.rid] = _Prompt(refusal=refusal)
        return refusal.receipt

    def _forget_aborted(self, present: set[str]) -> None:
        """Drop prompts that are not in this forward: sglang puts one that is cut into every prefill."""
        for rid in self._prompts.keys() - present:
            self._forget(rid)

    def _forget(self, rid: str) -> None:
        if prompt := self._prompts.pop(rid, None):
            self.sink.release([part.block for part in prompt.parts])


def _row_bytes(state: Tensor) -> int:
    return state.shape[1] * state.itemsize  # a slice's `nbytes` would cost ten times as long


def receipt_field(receipt: dict[str, Any]) -> dict[str, list[Any]]:
    """Return a receipt as sglang's customized info: one value for each new token, and there is one."""
    return {FIELD: [receipt]}
