"""Speculative decoding with a real target and a real draft, both KV-cached, batched.

One round: the draft proposes K tokens, a chain or a tree, the target reads them in one forward after
the last known token, and keeps what it agrees with plus one token of its own. Greedy decoding must
reproduce the target's own `generate`; sampling keeps the target's distribution.

Shape letters: B rows still running, K drafted tokens, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from draftcore.contracts.algorithm import Drafter, Proposal
from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec
from draftcore.errors import DraftcoreError
from draftcore.progress import Progress
from draftcore_eval.options import EvalOptions
from draftcore_eval.proposals import checked_proposal, depth_of, lineage, verify, verify_tree
from draftcore_eval.report import Decoded, Report, Tie
from draftcore_eval.runner import DecodeRunner, Prompts, Rows

# Top-2 gap, in logits, under which two forwards of one prefix may rank differently: eight units
# in the last place of a logit of 16 in half precision (bf16 0.125, fp16 2^-6), fifty in fp32.
# Seen on the small target, one H200, 2026-11: 0.51 in bf16, 4.1e-6 in fp32.
TIE_BOUNDS = {torch.bfloat16: 1.0, torch.float16: 0.125, torch.float32: 1e-4}
PLAIN_STEPS = 8  # plain steps that are timed, for their median
SECONDS_BETWEEN_LINES = 10.0  # about progress, where there is no terminal
# Gets how many prompts are done, and how far the batch after them is.
Show = Callable[[int, str], object]


# ---------------------------------------------------------------- the runner `eager`


class Eager:
    """Runs every batch and every round as it comes; see `contracts.runner.Runner`."""

    def check(self, target: TargetSpec) -> None:
        """Any target may be run as it comes."""

    def prefill(self, model: TargetModel) -> PrefillRunner:
        return model

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> DecodeRunner:
        return EagerRunner(model, drafter)

    def report(self) -> tuple[()]:
        return ()


@dataclass
class EagerRunner:
    """Decodes with what each batch allocates, round by round."""

    target: TargetModel
    drafter: Drafter

    def reserve(self, rows: int, max_len: int) -> None:
        """Nothing is reserved."""

    def start(self, prompts: Prompts, max_len: int, temperature: float, seed: int) -> Rows:
        return EagerRows(self, prompts, max_len, temperature, seed)


class EagerRows:
    """Rows in flight in caches of their own, which shrink as rows end."""

    def __init__(
        self, runner: EagerRunner, prompts: Prompts, max_len: int, temperature: float, seed: int
    ) -> None:
        self.target, self.drafter = target, drafter = runner.target, runner.drafter
        self.temperature = temperature
        self.generator = torch.Generator(target.device).manual_seed(seed)
        tokens_BT, self.lengths_B = right_padded(prompts, target.device)
        B, T = tokens_BT.shape
        self.cache = target.allocate(B, max_len)
        starts_B = torch.zeros_like(self.lengths_B)
        features = target.forward(self.cache, tokens_BT, starts_B, T, drafter.request)
        logits_BV = target.logits(features["last_hidden"][torch.arange(B), self.lengths_B - 1])
        self.last_B = logits_BV.argmax(-1)
        if temperature > 0:
            probs_BV = torch.softmax(logits_BV.float() / temperature, -1)
            self.last_B = torch.multinomial(probs_BV, 1, generator=self.generator)[:, 0]
        self.state = drafter.allocate(B, max_len)
        drafter.prefill(self.state, tokens_BT, self.lengths_B, features, self.last_B)
        self.proposal: Proposal | None = None

    def keep(self, rows: Sequence[int]) -> None:
        keep_B = torch.tensor(rows, device=self.lengths_B.device)
        for layer in self.cache:  # one after the other, so that no second cache is held
            layer[:] = [slots[keep_B] for slots in layer]
        self.state = self.drafter.select(self.state, keep_B)
        self.lengths_B, self.last_B = self.lengths_B[keep_B], self.last_B[keep_B]

    def propose(self) -> None:
        proposal = self.drafter.propose(self.state, self.temperature, self.generator)
        sizes, first = (len(self.last_B), self.target.spec.vocab_size), self.proposal is None
        self.proposal = checked_proposal(
            proposal, self.drafter, *sizes, self.temperature, values=first
        )

    def verify(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        proposal, seen_BTT = self.proposal, None
        assert proposal is not None
        if proposal.parents_BK is not None:
            seen_BTT = lineage(proposal.parents_BK)
        window_BT = torch.cat([self.last_B[:, None], proposal.tokens_BK], dim=1)
        features = self._read(window_BT, span, seen_BTT)
        logits_BTV = self.target.logits(features["last_hidden"])
        drafts = logits_BTV, proposal, self.temperature, self.generator
        if seen_BTT is None:
            tokens_BP, counts_B, room_B = verify(*drafts)
        else:
            depth = depth_of(self.drafter)
            tokens_BP, counts_B, room_B, path_BP = verify_tree(*drafts, seen_BTT, depth)
            features = self._follow(path_BP, features)
        self.drafter.accept(self.state, tokens_BP, features, counts_B)
        self.last_B = tokens_BP.gather(1, counts_B[:, None] - 1)[:, 0]
        self.lengths_B = self.lengths_B + counts_B
        return tokens_BP, counts_B, room_B

    def plain(self, span: int) -> None:
        features = self._read(self.last_B[:, None], span)
        self.last_B = self.target.logits(features["last_hidden"])[:, 0].argmax(-1)
        self.lengths_B = self.lengths_B + 1

    def _read(
        self, tokens_BT: Tensor, span: int, seen_BTT: Tensor | None = None
    ) -> dict[str, Tensor]:
        request = self.drafter.request
        return self.target.forward(self.cache, tokens_BT, self.lengths_B, span, request, seen_BTT)

    def _follow(self, path_BP: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a path's keys and values to the slots of its positions; return its features."""
        B, P = path_BP.shape
        rows, first = torch.arange(B, device=path_BP.device)[:, None], self.lengths_B[:, None]
        slots_BP = first + torch.arange(P, device=path_BP.device)
        for slots in itertools.chain(*self.cache):
            slots[rows, slots_BP] = slots[rows, first + path_BP]
        return {name: x[rows, path_BP] for name, x in features.items()}


def right_padded(prompts: Prompts, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return prompts as tokens_BT, padded with 0, and lengths_B."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    tokens_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens_BT.to(device), torch.tensor([len(row) for row in rows], device=device)


# ---------------------------------------------------------------- decoding with any runner


@dataclass
class Clock:
    """Seconds spent drafting and verifying, and rounds of the whole batch."""

    draft: float = 0.0
    verify: float = 0.0
    rounds: int = 0


class DecodingProgress(Progress):
    """Progress of decoding prompts, whose batches may take minutes each: of the batch under way as well."""

    def __init__(self, prompts: int, batch: int, verb: str = "decoding") -> None:
        self.done, self.under_way, self.ended = 0, "", threading.Event()
        super().__init__(prompts, verb=verb, every=batch, status_line=lambda: self.under_way)
        self.thread = threading.Thread(target=self.repeat, daemon=True)

    def __enter__(self) -> Self:
        if self.disable:
            self.thread.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.disable:
            self.thread.join()
        self.stop()

    def show_batch(self, done: int, under_way: str) -> None:
        """Show how many prompts are done, and what of the batch under way, '' at its end."""
        self.done, self.under_way = done, under_way
        if not under_way:
            self.show(done)

    def repeat(self) -> None:
        """Print a line every few seconds: of a batch, and of what takes long beside its rounds."""
        while not self.ended.wait(SECONDS_BETWEEN_LINES):
            self.tell(f"{self.line.format(self.done)}  {self.under_way}".rstrip())


def evaluate_prompts(
    runner: DecodeRunner, prompts: Prompts, config: EvalOptions,
    show: Show = lambda done, under_way: None,
    text: Callable[[Sequence[int]], str] | None = None,
) -> Report:  # fmt: skip
    """Decode prompts speculatively and, where greedy, compare each with the target's `generate`.

    Prompts are decoded in batches of like length; `text` writes tokens as text for the report.
    Raises DraftcoreError where the output differs from the reference by more than a tie.
    """
    clock = Clock()
    decoded, ties = decode(runner, prompts, config, show, clock)
    return Report.count(
        decoded,
        runner.drafter.num_drafts,
        depth_of(runner.drafter),
        text,
        lossless=True if config.temperature == 0 else None,
        ties=tuple(ties),
        draft_seconds=clock.draft / max(1, clock.rounds),
        verify_seconds=clock.verify / max(1, clock.rounds),
        plain_seconds=plain_step_seconds(runner, prompts[: config.batch], config),
    )


def decode(
    runner: DecodeRunner, prompts: Prompts, config: EvalOptions,
    show: Show = lambda done, under_way: None, clock: Clock | None = None, *, check: bool = True,
) -> tuple[list[Decoded], list[Tie]]:  # fmt: skip
    """Decode prompts in batches of like length; greedy ones are compared with `generate`, on `check`.

    Returns what was decoded, in the order of the prompts, and the ties. Raises as `resolve_ties` does.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    ties, results = list[Tie](), dict[int, Decoded]()
    runner.reserve(min(config.batch, len(prompts)), _max_len(runner, prompts, config))
    for start in range(0, len(order), config.batch):
        rows = order[start : start + config.batch]
        batch, seed = [prompts[i] for i in rows], config.seed + start
        show_batch = functools.partial(show, len(results))
        seeded = config.model_copy(update={"seed": seed})
        decoded = speculate(runner, batch, seeded, clock, show_batch)
        if check and config.temperature == 0:
            show_batch("the batch under way once more without the draft, to compare")
            references = runner.target.generate(batch, config.max_new_tokens)
            for output, reference in zip(decoded, references, strict=True):
                ties += resolve_ties(runner, output, reference, config)
        results.update(zip(rows, decoded, strict=True))
        show(len(results), "")
    return [results[i] for i in range(len(prompts))], ties


@torch.inference_mode()
def speculate(
    runner: DecodeRunner, prompts: Prompts, config: EvalOptions, clock: Clock | None = None,
    show: Callable[[str], object] = lambda under_way: None,
) -> list[Decoded]:  # fmt: skip
    """Decode a batch of prompts until each ends or has `max_new_tokens` tokens; `show` gets how far it is."""
    clock, K, end = clock or Clock(), runner.drafter.num_drafts, runner.target.end_tokens
    max_len = _max_len(runner, prompts, config)
    flight = runner.start(prompts, max_len, config.temperature, config.seed)
    firsts = flight.last_B.tolist()
    results = [Decoded(prompt, [token]) for prompt, token in zip(prompts, firsts, strict=True)]
    active = results
    while True:
        last = [(len(row.tokens), row.tokens[-1]) for row in active]
        limit = config.max_new_tokens
        running = [i for i, (n, token) in enumerate(last) if n < limit and token not in end]
        if not running:
            return results
        if len(running) < len(active):
            active = [active[i] for i in running]
            flight.keep(running)

        show(f"{sum(len(row.tokens) for row in results):,} tokens of the batch under way")
        began = _now(runner)
        flight.propose()
        drafted = _now(runner)
        span = max(len(row.prompt) + len(row.tokens) for row in active) + K
        tokens_BT, counts_B, room_B = flight.verify(span)
        figures_BF = torch.cat([counts_B[:, None], room_B[:, None], tokens_BT], 1)
        figures = figures_BF.tolist()  # the round's one transfer
        clock.draft += drafted - began
        clock.verify += _now(runner) - drafted
        clock.rounds += 1
        for row, (count, room, *tokens) in zip(active, figures, strict=True):
            # Tokens count up to the end token or the limit; what lies beyond counts nowhere.
            left = limit - len(row.tokens)
            new = cut_after(tokens[:count][:left], end)
            row.accepted.append(min(count - 1, len(new)))
            row.room.append(min(room, len(new) if new[-1] in end else left))
            row.tokens += new


def resolve_ties(
    runner: DecodeRunner, decoded: Decoded, reference: list[int], config: EvalOptions
) -> list[Tie]:
    """Compare a greedy decoding with the target's own: resolve ties, raise DraftcoreError on anything else.

    Batched cached decoding and `generate` round differently. So the prefix of the first difference
    is recomputed in the next wider type (fp64 for an fp32 target, else fp32): a top-2 gap under the
    bound is a tie, and decoding goes on from the target's token. A wider gap is an error.
    """
    target, ties = runner.target, list[Tie]()
    bound = config.tie_bound or TIE_BOUNDS[target.dtype]
    while decoded.tokens != reference:
        pairs = enumerate(itertools.zip_longest(decoded.tokens, reference))
        position, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        gap = target.top2_gap([*decoded.prompt, *reference[:position]])
        if gap > bound or theirs is None:
            raise DraftcoreError(
                f"speculative decoding is not lossless: token {position + 1} of a prompt of "
                f"{len(decoded.prompt)} tokens is {ours}, the target's own generate gives {theirs}\n"
                f"  ({target.dtype}, top-2 gap {gap:.4g}, tie bound {bound:.4g})\n"
                "  this is a bug in the drafter, the target's cache or the verifier: please report it"
            )
        ties.append(Tie(position, gap))
        decoded.cut(position, theirs)
        left = config.max_new_tokens - position - 1
        if left < 1 or theirs in target.end_tokens:
            break
        rest = config.model_copy(update={"max_new_tokens": left})
        (more,) = speculate(runner, [[*decoded.prompt, *decoded.tokens]], rest)
        decoded.tokens += more.tokens
        decoded.accepted += [0, *more.accepted]  # its first token was verified as well: a round
        decoded.room += [0, *more.room]
    return ties


@torch.inference_mode()
def plain_step_seconds(runner: DecodeRunner, prompts: Prompts, config: EvalOptions) -> float:
    """Time one plain decoding step of the target at this batch, the median of a few."""
    longest, seconds = max(map(len, prompts)), []
    max_len = max(longest + PLAIN_STEPS, _max_len(runner, prompts, config))
    flight = runner.start(prompts, max_len, 0.0, seed=0)
    for step in range(PLAIN_STEPS):
        began = _now(runner)
        flight.plain(longest + step + 1)
        seconds.append(_now(runner) - began)
    return sorted(seconds)[PLAIN_STEPS // 2]


def _max_len(runner: DecodeRunner, prompts: Prompts, config: EvalOptions) -> int:
    """Return how many positions a batch may read, the drafts past its end included."""
    return max(map(len, prompts)) + config.max_new_tokens + runner.drafter.num_drafts + 1


def cut_after(tokens: list[int], end: Collection[int]) -> list[int]:
    """Return tokens up to the first end token, that one included."""
    at = next((i for i, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: at + 1]


def _now(runner: DecodeRunner) -> float:
    if runner.target.device.type == "cuda":
        torch.cuda.synchronize(runner.target.device)
    return time.perf_counter()
