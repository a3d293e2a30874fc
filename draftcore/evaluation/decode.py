"""Chain speculative decoding with a real target and a real draft, both KV-cached, batched.

One round: the draft proposes K tokens, the target reads them in one forward after the last known
token, and keeps the longest prefix it agrees with plus one token of its own. Greedy decoding must
reproduce the target's own `generate`; sampling keeps the target's distribution by rejection
sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

Shape letters: B rows still running, K drafted tokens, T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftcore.config import EvalConfig
from draftcore.contracts.algorithm import Drafter
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import DecodeRunner, Rows
from draftcore.contracts.target import TargetModel, TargetState
from draftcore.errors import DraftcoreError
from draftcore.evaluation.report import Decoded, Report, Tie

# Top-2 gap, in logits, under which two forwards of one prefix may rank differently: eight units
# in the last place of a logit of 16 in half precision (bf16 0.125, fp16 2^-6), fifty in fp32.
# Seen on the small target, one H200, 2026-11: 0.51 in bf16, 4.1e-6 in fp32.
TIE_BOUNDS = {torch.bfloat16: 1.0, torch.float16: 0.125, torch.float32: 1e-4}


@dataclass
class Clock:
    """Seconds spent drafting and verifying, and rounds of the whole batch."""

    draft: float = 0.0
    verify: float = 0.0
    rounds: int = 0


class EagerRunner:
    """Runs every round of decoding as it comes."""

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter

    def reserve(self, rows: int, max_len: int) -> None:
        """Nothing is reserved: each batch allocates what it needs."""

    def start(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        max_len: int,
        temperature: float,
        generator: torch.Generator,
    ) -> Rows:
        rows = EagerRows(self.target, self.drafter, lengths_B, max_len, temperature, generator)
        rows.read(tokens_BT)
        return rows


class EagerRows:
    """Rows in flight in caches of their own, which shrink as rows end."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        lengths_B: Tensor,
        max_len: int,
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        self.target, self.drafter, self.lengths_B = target, drafter, lengths_B
        self.max_len, self.temperature, self.generator = max_len, temperature, generator
        self.cache = target.allocate(len(lengths_B), max_len)
        self.drafts_BK: Tensor
        self.draft_probs_BKV: Tensor | None = None

    def read(self, tokens_BT: Tensor) -> None:
        target, drafter = self.target, self.drafter
        features, self.last_B = read_prompts(
            target, self.cache, tokens_BT, self.lengths_B, drafter, self.temperature, self.generator
        )
        self.state = drafter.allocate(len(tokens_BT), self.max_len)
        drafter.prefill(self.state, tokens_BT, self.lengths_B, features, self.last_B)

    def keep(self, rows: Sequence[int]) -> None:
        keep_B = torch.tensor(rows, device=self.lengths_B.device)
        self.cache = self.target.select(self.cache, keep_B)
        self.state = self.drafter.select(self.state, keep_B)
        self.lengths_B, self.last_B = self.lengths_B[keep_B], self.last_B[keep_B]

    def propose(self) -> None:
        self.drafts_BK, self.draft_probs_BKV = self.drafter.propose(
            self.state, self.temperature, self.generator
        )

    def verify(self, span: int) -> tuple[Tensor, Tensor]:
        features = read_drafts(
            self.target, self.cache, self.last_B, self.drafts_BK, self.lengths_B, span, self.drafter
        )
        logits_BTV = self.target.logits(features["last_hidden"])
        tokens_BT, counts_B = verify(
            logits_BTV, self.drafts_BK, self.draft_probs_BKV, self.temperature, self.generator
        )
        self.drafter.accept(self.state, tokens_BT, features, counts_B)
        rows = torch.arange(len(counts_B), device=counts_B.device)
        self.last_B, self.lengths_B = tokens_BT[rows, counts_B - 1], self.lengths_B + counts_B
        return tokens_BT, counts_B

    def plain(self, span: int) -> None:
        self.last_B = read_one(self.target, self.cache, self.last_B, self.lengths_B, span)
        self.lengths_B = self.lengths_B + 1


def evaluate_prompts(
    runner: DecodeRunner, prompts: Sequence[Sequence[int]], config: EvalConfig
) -> Report:
    """Decode prompts speculatively and, where greedy, compare each with the target's `generate`.

    Prompts are decoded in batches of like length. Raises DraftcoreError where the output differs
    from the reference by more than a tie.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    clock, ties = Clock(), []
    target, drafter, longest = runner.target, runner.drafter, max(map(len, prompts))
    runner.reserve(min(config.batch, len(prompts)), _max_len(longest, config, drafter))
    results: dict[int, Decoded] = {}
    for start in range(0, len(order), config.batch):
        rows = order[start : start + config.batch]
        batch = [list(prompts[i]) for i in rows]
        decoded = speculate(runner, batch, config, clock, config.seed + start)
        if config.temperature == 0:
            references = target.generate(batch, config.max_new_tokens)
            for prompt, one, reference in zip(batch, decoded, references, strict=True):
                ties += resolve_ties(runner, prompt, one, reference, config, clock)
        results.update(zip(rows, decoded, strict=True))
    return Report.of(
        [results[i] for i in range(len(prompts))],
        ties=ties,
        checked=config.temperature == 0,
        draft_seconds=clock.draft / max(1, clock.rounds),
        verify_seconds=clock.verify / max(1, clock.rounds),
        plain_seconds=plain_step_seconds(runner, prompts[: config.batch], config),
        num_drafts=drafter.num_drafts,
    )


@torch.inference_mode()
def speculate(
    runner: DecodeRunner,
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    clock: Clock,
    seed: int = 0,
) -> list[Decoded]:
    """Decode a batch of prompts until each ends or has `max_new_tokens` tokens."""
    target, drafter = runner.target, runner.drafter
    K, device = drafter.num_drafts, target.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens_BT, lengths_B = right_padded(prompts, device)
    max_len = _max_len(tokens_BT.shape[1], config, drafter)
    flight = runner.start(tokens_BT, lengths_B, max_len, config.temperature, generator)
    results = [Decoded([token]) for token in flight.last_B.tolist()]
    active = list(range(len(prompts)))
    while True:
        running = [i for i, row in enumerate(active) if not _ended(results[row], target, config)]
        if len(running) < len(active):
            if not running:
                return results
            active = [active[i] for i in running]
            flight.keep(running)

        began = _now(device)
        flight.propose()
        drafted = _now(device)
        span = max(len(prompts[row]) + len(results[row].tokens) for row in active) + K
        tokens_BT, counts_B = flight.verify(span)
        counts, tokens = counts_B.tolist(), tokens_BT.tolist()  # the round's one transfer
        clock.draft += drafted - began
        clock.verify += _now(device) - drafted
        clock.rounds += 1
        for i, row in enumerate(active):
            _append(results[row], tokens[i][: counts[i]], K, target, config)


def right_padded(
    prompts: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return prompts as tokens_BT, padded with 0, and lengths_B."""
    tokens_BT = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
    return tokens_BT.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)


def read_prompts(
    target: TargetModel,
    cache: TargetState,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    drafter: Drafter,
    temperature: float,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], Tensor]:
    """Read right-padded prompts into the cache; return their features and the next tokens."""
    B, T = tokens_BT.shape
    positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, -1)
    features = target.forward(cache, tokens_BT, positions_BT, T, drafter.request)
    last_hidden_BH = features["last_hidden"][torch.arange(B), lengths_B - 1]
    return features, choose(target.logits(last_hidden_BH), temperature, generator)


def read_drafts(
    target: TargetModel,
    cache: TargetState,
    last_B: Tensor,
    drafts_BK: Tensor,
    lengths_B: Tensor,
    span: int,
    drafter: Drafter,
) -> dict[str, Tensor]:
    """Read the last token of each row and the drafts after it; return their features."""
    window_BT = torch.cat([last_B[:, None], drafts_BK], dim=1)
    offsets_T = torch.arange(window_BT.shape[1], device=lengths_B.device)
    return target.forward(cache, window_BT, lengths_B[:, None] + offsets_T, span, drafter.request)


def read_one(
    target: TargetModel, cache: TargetState, last_B: Tensor, lengths_B: Tensor, span: int
) -> Tensor:
    """Read one token of each row; return the next, the target's best."""
    request = FeatureRequest((), True, "float32")
    features = target.forward(cache, last_B[:, None], lengths_B[:, None], span, request)
    return target.logits(features["last_hidden"])[:, 0].argmax(-1)


def verify(
    logits_BTV: Tensor,
    drafts_BK: Tensor,
    draft_probs_BKV: Tensor | None,
    temperature: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of the drafts and add one token of the target's own.

    Returns tokens_BT (T = K + 1; the first counts_B of a row count) and counts_B in 1..K+1. With
    temperature 0 a draft is accepted where it is the target's argmax; else with probability
    min(1, p/q), the replacement being drawn from max(0, p - q) renormalised.
    """
    B, K = drafts_BK.shape
    if temperature == 0 or draft_probs_BKV is None:
        choice_BT = logits_BTV.argmax(-1)
        accepted_B = (choice_BT[:, :K] == drafts_BK).long().cumprod(1).sum(1)
        return choice_BT, accepted_B + 1
    p_BTV = torch.softmax(logits_BTV.float() / temperature, -1)
    at = drafts_BK[..., None]
    p_BK, q_BK = p_BTV[:, :K].gather(-1, at)[..., 0], draft_probs_BKV.gather(-1, at)[..., 0]
    coin_BK = torch.rand(B, K, generator=generator, device=p_BK.device)
    accepted_B = (coin_BK * q_BK < p_BK).long().cumprod(1).sum(1)
    # Past the last draft nothing was proposed, so the residual there is the target's own p.
    q_BTV = torch.cat([draft_probs_BKV, torch.zeros_like(p_BTV[:, :1])], dim=1)
    rows = torch.arange(B, device=p_BK.device)
    residual_BV = (p_BTV - q_BTV)[rows, accepted_B].clamp(min=0)
    own_B = torch.multinomial(residual_BV, 1, generator=generator)[:, 0]
    tokens_BT = torch.cat([drafts_BK, drafts_BK[:, :1]], dim=1)
    tokens_BT[rows, accepted_B] = own_B
    return tokens_BT, accepted_B + 1


def choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Argmax, or a draw from the softmax at `temperature`."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    probs_BV = torch.softmax(logits_BV.float() / temperature, -1)
    return torch.multinomial(probs_BV, 1, generator=generator)[:, 0]


def resolve_ties(
    runner: DecodeRunner,
    prompt: list[int],
    decoded: Decoded,
    reference: list[int],
    config: EvalConfig,
    clock: Clock,
) -> list[Tie]:
    """Compare a greedy decoding with the target's own: resolve ties, raise DraftcoreError on anything else.

    Batched cached decoding and `generate` round differently. So the prefix of the first difference
    is recomputed in the next wider type (fp64 for an fp32 target, else fp32): a top-2 gap under the
    bound is a tie, and decoding goes on from the target's token. A wider gap is an error.
    """
    target, ties = runner.target, list[Tie]()
    while decoded.tokens != reference:
        at = _first_difference(decoded.tokens, reference)
        ours, theirs = decoded.tokens[at : at + 1], reference[at : at + 1]
        bound = config.tie_bound or TIE_BOUNDS[target.dtype]
        gap = target.top2_gap([*prompt, *reference[:at]])
        if gap > bound or not theirs:
            raise DraftcoreError(
                f"speculative decoding is not lossless: token {at + 1} of a prompt of {len(prompt)} "
                f"tokens is {ours}, the target's own generate gives {theirs}\n"
                f"  ({target.dtype}, top-2 gap {gap:.4g}, tie bound {bound:.4g})\n"
                "  this is a bug in the drafter, the target's cache or the verifier: please report it"
            )
        ties.append(Tie(position=at, gap=gap))
        rest = config.model_copy(update={"max_new_tokens": config.max_new_tokens - at - 1})
        _truncate(decoded, at, reference[at])
        if rest.max_new_tokens < 1 or reference[at] in target.end_tokens:
            break
        prefix = [*prompt, *reference[: at + 1]]
        (more,) = speculate(runner, [prefix], rest, clock)
        decoded.tokens += more.tokens
        decoded.accepted += [0, *more.accepted]  # its first token was verified as well: a round
        decoded.room += [0, *more.room]
    return ties


@torch.inference_mode()
def plain_step_seconds(
    runner: DecodeRunner, prompts: Sequence[Sequence[int]], config: EvalConfig, steps: int = 8
) -> float:
    """Time one plain decoding step of the target at this batch, the median of a few."""
    target, seconds = runner.target, []
    tokens_BT, lengths_B = right_padded(prompts, target.device)
    longest = tokens_BT.shape[1]
    max_len = max(longest + steps, _max_len(longest, config, runner.drafter))
    flight = runner.start(tokens_BT, lengths_B, max_len, 0.0, torch.Generator(target.device))
    for step in range(steps):
        began = _now(target.device)
        flight.plain(longest + step + 1)
        seconds.append(_now(target.device) - began)
    return sorted(seconds)[len(seconds) // 2]


def _max_len(longest: int, config: EvalConfig, drafter: Drafter) -> int:
    """The positions that a batch may read, the drafts past its end included."""
    return longest + config.max_new_tokens + drafter.num_drafts + 1


def _append(
    result: Decoded, tokens: list[int], num_drafts: int, target: TargetModel, config: EvalConfig
) -> None:
    """Add a round's tokens, up to the end token or the limit; what lies beyond counts nowhere."""
    room = min(num_drafts, config.max_new_tokens - len(result.tokens))
    kept = tokens[: config.max_new_tokens - len(result.tokens)]
    for i, token in enumerate(kept):
        if token in target.end_tokens:
            kept, room = kept[: i + 1], min(room, i + 1)
            break
    result.accepted.append(min(len(tokens) - 1, len(kept)))
    result.room.append(room)
    result.tokens += kept


def _truncate(decoded: Decoded, at: int, token: int) -> None:
    """Cut a decoding before position `at` and put the target's token there."""
    kept = 1
    for rounds, accepted in enumerate(decoded.accepted):
        if kept + accepted + 1 > at:
            decoded.accepted[rounds] = max(0, at - kept)
            del decoded.accepted[rounds + 1 :], decoded.room[rounds + 1 :]
            break
        kept += accepted + 1
    decoded.tokens = [*decoded.tokens[:at], token]


def _ended(result: Decoded, target: TargetModel, config: EvalConfig) -> bool:
    return len(result.tokens) >= config.max_new_tokens or result.tokens[-1] in target.end_tokens


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
