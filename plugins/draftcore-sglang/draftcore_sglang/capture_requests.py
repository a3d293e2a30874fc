"""Take the captures that a server's requests ask for, and give each its receipt.

This runs in the scheduler's process and knows nothing of sglang: a request is its id, its ask and
its length. A prompt may pass in several forwards (chunked prefill): its rows are collected. A prompt
whose rows do not begin at its first token, or have a gap, is refused: a cached prefix has no states.
A request whose capture is being written is `held`: sglang is done with it, and its answer leaves
when the receipt is there. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftcore.uris import format_size
from draftcore_sglang.staging import Block, Staging
from draftcore_sglang.wire import FAILED, MISREAD, REFUSED, SHORT, Ask, Refusal, digest
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
    tokens: Sequence[int] = ()  # of the prompt, those of its images written by the server


@dataclass(frozen=True)
class _Rows:
    """A request's rows of a forward, by feature, and the block that they lie in."""

    block: Block
    places: Mapping[str, Place]


@dataclass
class _Prompt:
    """The rows so far of a prompt that passes in several forwards, or why it is refused."""

    parts: list[_Rows] = field(default_factory=list)
    rows: int = 0
    refusal: Refusal | None = None


class CaptureRequests:
    """Takes states in and gives receipts out, by request id. Used by one thread, the scheduler's.

    `problem` says why nothing can be captured here; only then may there be no staging memory.
    """

    def __init__(
        self, staging: Staging | None, about: Mapping[str, Any], names: Sequence[str],
        problem: str = "",
    ) -> None:  # fmt: skip
        self.about, self.names, self.problem = about, frozenset(names), problem
        self._staging = staging
        self.held: dict[str, Any] = {}  # request id: what the caller keeps for it
        self._prompts: dict[str, _Prompt] = {}

    def take(
        self, shares: Sequence[Slice], states: Mapping[str, Tensor] | None, ready: Any
    ) -> dict[str, Receipt]:
        """Take the shares of a forward; return, by request id, the receipts that are there at once.

        A request that becomes held is in `held` until `receipts` returns its receipt.
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
                self.staging.send(jobs)
                self.held |= dict.fromkeys(jobs)
            except OSError as error:  # no writer can be started
                for rid, (_, blocks) in jobs.items():
                    self.staging.release(blocks)
                    answers[rid] = refusal_of(error).receipt
        return answers

    @property
    def staging(self) -> Staging:
        assert self._staging is not None
        return self._staging

    def receipts(self) -> list[tuple[Any, Receipt]]:
        """Return what was held and has its receipt now, with the receipt."""
        return [(self.held.pop(rid), receipt) for rid, receipt in self.staging.receipts().items()]

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
        if ask.read and digest(share.tokens) != ask.read:
            raise Refusal(
                MISREAD,
                f"with its images the server reads other tokens, {share.prompt} of them, than the row has",
            )
        if states is None or (absent := sorted(set(ask.names) - states.keys())):
            what = "states" if states is None else ", ".join(absent)
            raise Refusal(FAILED, f"the forward left no {what}")
        # A slice's `nbytes` would cost ten times as long.
        row_bytes = sum(states[name].shape[1] * states[name].itemsize for name in ask.names)
        if share.prompt * row_bytes > self.staging.max_bytes // 2:  # never room: blocks leave gaps
            raise Refusal(
                REFUSED,
                f"{share.prompt} tokens have {format_size(share.prompt * row_bytes)} of states, and a "
                f"prompt gets half of DRAFTCORE_BUFFER={format_size(self.staging.max_bytes)}",
            )
        self._require_next(share)

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
            # A cut prompt is in every prefill: one that is not in this forward was aborted.
            for rid in self._prompts.keys() - {share.rid for share, _ in wanted}:
                self._forget(rid)
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
        block = self.staging.stage({name: states[name][first:end] for name in names}, ready)
        block.users = len(wanted)
        return [
            (share, ask, _Rows(block, block.part(ask.names, share.first - first, share.rows)))
            for share, ask in wanted
        ]

    def _add(self, share: Slice, ask: Ask, rows: _Rows) -> tuple[Job, Sequence[Block]] | None:
        """Add rows to their prompt; return it as a job where it is whole."""
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

    def _forget(self, rid: str) -> None:
        if prompt := self._prompts.pop(rid, None):
            self.staging.release([part.block for part in prompt.parts])
