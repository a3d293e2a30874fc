"""The graph runner of decoding: replays each round of drafting and verifying as two graphs.

The caches of target and draft are allocated once, for the most rows and positions that `reserve` was
asked for. A bucket of fewer rows is their first rows, in the same memory. Prompts are read eagerly; then
every round stays in static buffers. The draft graph writes the drafts, the verify graph reads them and
writes each row's last token and length. They are two graphs so that both can be timed.

A row of padding repeats a row that is still running, and takes over its verdict: so both have one
length, and no row of padding runs past the end of a cache. When rows end, the other rows are copied into
the first rows.

Shape letters: B live rows, R rows of the bucket, K drafts, T = K + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from draftcore_eval.decode import EagerRunner, right_padded
from draftcore_eval.proposals import checked_proposal, verify
from draftcore_eval.runner import Prompts, Rows
from draftcore_hf.decoder import decoder_model
from torch import Tensor, nn

from draftcore.contracts.algorithm import Drafter, Proposal
from draftcore.contracts.runner import Batch, GraphBackend, Outputs, ShapeKey
from draftcore.contracts.target import TargetCache, TargetModel
from draftcore.errors import DraftcoreError
from draftcore_graphs.buckets import pad_to
from draftcore_graphs.buffers import Slot, StaticBuffers
from draftcore_graphs.divided import DividedRow
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.resolve import Phase
from draftcore_graphs.runners import GraphRunner
from draftcore_graphs.states import narrow, settle, tensors

DRAFT, VERIFY, PLAIN = "draft", "verify", "plain"
CALLS = 4  # of a function before its graph can replay, and one more; each moves the rows on


class DecodeGraphRunner(GraphRunner):
    """Replays rounds of greedy decoding. `module` holds the draft's weights.

    A batch of more rows or positions than the largest bucket is decoded eagerly.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        module: nn.Module,
        phase: Phase,
        backend: GraphBackend,
        plugins: Sequence[GraphPlugin] = (),
    ) -> None:
        super().__init__(phase, backend, plugins)
        self.target, self.drafter, self.module = target, drafter, module
        self.eager = EagerRunner(target, drafter)
        self.most_rows = self.span = 0
        self.cache: TargetCache
        self.state: Any

    @torch.inference_mode()
    def reserve(self, rows: int, max_len: int) -> None:
        """Allocate the caches, unless they are large enough; graphs of smaller ones are dropped."""
        wanted = self.rows(rows) or (self.phase.rows[-1] if self.phase.padding else rows)
        span = pad_to(max_len, self.phase.lengths) or self.phase.lengths[-1]
        if wanted <= self.most_rows and span <= self.span:
            return
        self.forget()
        self.most_rows, self.span = max(wanted, self.most_rows), max(span, self.span)
        max_len = self.span + CALLS * (self.drafter.num_drafts + 1)
        try:
            self._allocate(self.most_rows, max_len)
        except torch.OutOfMemoryError as error:
            what = f"caches of {self.most_rows} rows x {max_len} tokens"
            raise self.no_memory(what, error) from None

    def _allocate(self, rows: int, max_len: int) -> None:
        self.max_len, K = max_len, self.drafter.num_drafts
        slots = (
            Slot("last_B", lambda key: (key.rows,), torch.long, "rows", repeat=True),
            Slot("lengths_B", lambda key: (key.rows,), torch.long, "rows", repeat=True),
            Slot("live_B", lambda key: (key.rows,), torch.bool, "rows"),
            Slot("source_B", lambda key: (key.rows,), torch.long, "rows"),  # 0: the first row
            Slot("drafts_BK", lambda key: (key.rows, K), torch.long, "none"),
            Slot("room_B", lambda key: (key.rows,), torch.long, "none"),
        )
        self.buffers = StaticBuffers(slots, [ShapeKey(rows)], self.target.device)
        self.cache = self.target.allocate(rows, max_len)
        self.state = self.drafter.allocate(rows, max_len)

    @torch.inference_mode()
    def start(self, prompts: Prompts, max_len: int, temperature: float, seed: int) -> Rows:
        rows = self.rows(len(prompts))
        if rows is None or rows > self.most_rows or max_len > self.span or temperature > 0:
            self.counts["no bucket"] += 1
            return self.eager.start(prompts, max_len, temperature, seed)
        self.ready(self.keys())
        self.admit(rows, *right_padded(prompts, self.target.device))
        return GraphRows(self, rows, len(prompts))

    def keys(self) -> list[ShapeKey]:
        """Return the buckets that fit into the caches: drafts by rows, verdicts by rows and span."""
        rows = [size for size in self.phase.rows if size <= self.most_rows]
        spans = [size for size in self.phase.lengths if size <= self.span]
        return [
            *(ShapeKey(size, variant=DRAFT) for size in rows),
            *(ShapeKey(size, span, VERIFY) for size in rows for span in spans),
        ]

    def admit(self, rows: int, tokens_BT: Tensor, lengths_B: Tensor) -> None:
        """Read prompts into the first rows, and let the bucket's other rows repeat the first."""
        (B, T), request = tokens_BT.shape, self.drafter.request
        starts_B = torch.zeros_like(lengths_B)
        features = self.target.forward(narrow(self.cache, B), tokens_BT, starts_B, T, request)
        last_BH = features["last_hidden"][torch.arange(B), lengths_B - 1]
        last_B = self.target.logits(last_BH).argmax(-1)
        fresh = self.drafter.allocate(B, self.max_len)
        self.drafter.prefill(fresh, tokens_BT, lengths_B, features, last_B)
        settle(self.state, fresh)
        for tensor in tensors((self.cache, self.state)):
            tensor[B:rows].copy_(tensor[:1].expand_as(tensor[B:rows]))
        self.place(rows, last_B, lengths_B)

    def place(self, rows: int, last_B: Tensor, lengths_B: Tensor) -> None:
        """Write the live rows' last tokens and lengths into the buffers of a bucket."""
        source_B = torch.arange(len(last_B), device=last_B.device)
        live_B = torch.ones_like(last_B, dtype=torch.bool)
        live = {"last_B": last_B, "lengths_B": lengths_B, "live_B": live_B, "source_B": source_B}
        self.buffers.fill(ShapeKey(rows), live)

    def before_capture(self, key: ShapeKey) -> None:
        """Let every row have read a single token."""
        token_B1 = torch.zeros(key.rows, 1, dtype=torch.long, device=self.target.device)
        self.admit(key.rows, token_B1, torch.ones_like(token_B1[:, 0]))

    def weights(self) -> Iterable[Tensor]:
        modules = (decoder_model(self.target, "a graph of a round").model, self.module)
        return [t for module in modules for t in (*module.parameters(), *module.buffers())]

    def work(self, key: ShapeKey) -> Work:
        kinds = {DRAFT: self._draft, VERIFY: self._verify, PLAIN: self._plain}
        do = kinds[key.variant](key)

        def whole(
            batch: Batch, *, ends: DividedRow | None = None, begins: DividedRow | None = None
        ) -> Outputs:
            if len(batch["lengths_B"]) != key.rows or ends is not None or begins is not None:
                raise DraftcoreError(
                    f"a graph plugin divided a batch of {key.rows} rows that are decoded, whose "
                    "caches cannot be divided\n"
                    "  let its offer have the capability 'phase:prefill'"
                )
            return do(batch)

        return whole

    def _draft(self, key: ShapeKey) -> Callable[[Batch], Outputs]:
        def draft(batch: Batch) -> None:
            state = narrow(self.state, key.rows)
            found = self.drafter.propose(state)
            proposal = checked_proposal(found, self.drafter, key.rows, self.target.spec.vocab_size)
            batch["drafts_BK"].copy_(proposal.tokens_BK)
            batch["room_B"].fill_(self.drafter.num_drafts)
            if proposal.counts_B is not None:
                batch["room_B"].copy_(proposal.counts_B)
            settle(self.state, state)

        return draft

    def _verify(self, key: ShapeKey) -> Callable[[Batch], Outputs]:
        cache, generator = narrow(self.cache, key.rows), torch.Generator(self.target.device)

        def read_and_verify(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            last_B, lengths_B, source_B = (batch[n] for n in ("last_B", "lengths_B", "source_B"))
            drafts_BK = batch["drafts_BK"]
            window_BT, request = torch.cat([last_B[:, None], drafts_BK], 1), self.drafter.request
            features = self.target.forward(cache, window_BT, lengths_B, key.length, request)
            logits_BTV = self.target.logits(features["last_hidden"])
            proposal = Proposal(drafts_BK, counts_B=batch["room_B"])
            tokens_BT, counts_B, room_B = verify(logits_BTV, proposal, 0.0, generator)
            tokens_BT, counts_B = tokens_BT[source_B], counts_B[source_B]
            state = narrow(self.state, key.rows)
            self.drafter.accept(state, tokens_BT, features, counts_B)
            settle(self.state, state)
            last_B.copy_(tokens_BT.gather(1, counts_B[:, None] - 1)[:, 0])
            lengths_B.add_(counts_B)
            return tokens_BT, counts_B, room_B

        return read_and_verify

    def _plain(self, key: ShapeKey) -> Callable[[Batch], Outputs]:
        cache, request = narrow(self.cache, key.rows), self.drafter.request

        def step(batch: Batch) -> None:
            last_B, lengths_B = batch["last_B"], batch["lengths_B"]
            tokens_B1 = last_B[:, None]
            features = self.target.forward(cache, tokens_B1, lengths_B, key.length, request)
            last_B.copy_(self.target.logits(features["last_hidden"])[:, 0].argmax(-1))
            lengths_B.add_(1)

        return step


class GraphRows:
    """Rows in flight in the runner's static buffers: the first `live` of a bucket's `rows`."""

    def __init__(self, runner: DecodeGraphRunner, rows: int, live: int) -> None:
        self.runner, self.rows, self.live = runner, rows, live
        self.last_B = runner.buffers.view(ShapeKey(rows))["last_B"][:live]
        self.begun = False

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        runner = self.runner
        now = runner.buffers.view(ShapeKey(self.rows))
        bucket, device = runner.rows(len(rows)) or len(rows), runner.target.device
        padding = [rows[0]] * (bucket - len(rows))
        keep_R = torch.tensor([*rows, *padding], device=device)
        for tensor in tensors(runner.cache):
            tensor[:bucket].copy_(tensor[keep_R])
        state = narrow(runner.state, self.rows)
        settle(runner.state, runner.drafter.select(state, keep_R))
        keep_B = keep_R[: len(rows)]
        runner.place(bucket, now["last_B"][keep_B], now["lengths_B"][keep_B])
        self.rows, self.live = bucket, len(rows)

    @torch.inference_mode()
    def propose(self) -> None:
        runner, key = self.runner, ShapeKey(self.rows, variant=DRAFT)
        runner.run(key, {})
        if not self.begun:
            batch, vocab_size = runner.buffers.view(key), runner.target.spec.vocab_size
            drafts = Proposal(batch["drafts_BK"], counts_B=batch["room_B"])
            checked_proposal(drafts, runner.drafter, self.rows, vocab_size, values=True)
        self.begun = True

    @torch.inference_mode()
    def verify(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        key = self._key(span, VERIFY)
        tokens_BT, counts_B, room_B = self.runner.run(key, {})
        self.last_B = self.runner.buffers.view(key)["last_B"][: self.live]
        live = slice(self.live)
        return tokens_BT[live].clone(), counts_B[live].clone(), room_B[live].clone()

    @torch.inference_mode()
    def plain(self, span: int) -> None:
        key = self._key(span, PLAIN)
        self.runner.ready([*self.runner.keys(), key])
        self.runner.run(key, {})
        self.last_B = self.runner.buffers.view(key)["last_B"][: self.live]

    def _key(self, span: int, variant: str) -> ShapeKey:
        bucket = pad_to(span, self.runner.phase.lengths)
        assert bucket is not None
        return ShapeKey(self.rows, bucket, variant)
