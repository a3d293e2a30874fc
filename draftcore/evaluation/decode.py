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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftcore.config import EvalConfig
from draftcore.errors import DraftcoreError
from draftcore.evaluation.report import Report, Tie
from draftcore.records import Drafter, FeatureRequest
from draftcore.target import TargetModel

# Top-2 gap, in logits, under which two forwards of one prefix may rank differently: eight units
# in the last place of a logit of 16 in half precision (bf16 0.125, fp16 2^-6), fifty in fp32.
# Seen on the small target, one H200, 2026-11: 0.51 in bf16, 4.1e-6 in fp32.
TIE_BOUNDS = {torch.bfloat16: 1.0, torch.float16: 0.125, torch.float32: 1e-4}


@dataclass
class Decoded:
    """One prompt's continuation; `accepted` holds the accepted drafts of each round."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)  # drafts of the round that could still count


@dataclass
class Clock:
    """Seconds spent drafting and verifying, and rounds of the whole batch."""

    draft: float = 0.0
    verify: float = 0.0
    rounds: int = 0


def evaluate_prompts(
    target: TargetModel, drafter: Drafter, prompts: Sequence[Sequence[int]], config: EvalConfig
) -> Report:
    """Decode prompts speculatively and, where greedy, compare each with the target's `generate`.

    Prompts are decoded in batches of like length. Raises DraftcoreError where the output differs
    from the reference by more than a tie.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    clock, ties = Clock(), []
    results: dict[int, Decoded] = {}
    for start in range(0, len(order), config.batch):
        rows = order[start : start + config.batch]
        batch = [list(prompts[i]) for i in rows]
        decoded = speculate(target, drafter, batch, config, clock, seed=config.seed + start)
        if config.temperature == 0:
            references = target.generate(batch, config.max_new_tokens)
            for prompt, one, reference in zip(batch, decoded, references, strict=True):
                ties += settle(target, drafter, prompt, one, reference, config, clock)
        results.update(zip(rows, decoded, strict=True))
    return Report.of(
        [results[i] for i in range(len(prompts))],
        ties=ties,
        checked=config.temperature == 0,
        draft_seconds=clock.draft / max(1, clock.rounds),
        verify_seconds=clock.verify / max(1, clock.rounds),
        plain_seconds=plain_step_seconds(target, prompts[: config.batch]),
        num_drafts=drafter.num_drafts,
    )


@torch.inference_mode()
def speculate(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    clock: Clock,
    seed: int = 0,
) -> list[Decoded]:
    """Decode a batch of prompts until each ends or has `max_new_tokens` tokens."""
    K, device = drafter.num_drafts, target.device
    generator = torch.Generator(device).manual_seed(seed)
    longest = max(map(len, prompts))
    max_len = longest + config.max_new_tokens + K + 1
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
    tokens_BT = tokens_BT.to(device)

    positions_BT = torch.arange(longest, device=device).expand(len(prompts), -1)
    cache = target.allocate(len(prompts), max_len)
    features = target.forward(cache, tokens_BT, positions_BT, longest, drafter.request)
    last_hidden_BH = features["last_hidden"][torch.arange(len(prompts)), lengths_B - 1]
    last_B = choose(target.logits(last_hidden_BH), config.temperature, generator)
    state = drafter.allocate(len(prompts), max_len)
    drafter.prefill(state, tokens_BT, lengths_B, features, last_B)

    results = [Decoded([token]) for token in last_B.tolist()]
    active = list(range(len(prompts)))
    while True:
        running = [i for i, row in enumerate(active) if not _ended(results[row], target, config)]
        if len(running) < len(active):
            if not running:
                return results
            active = [active[i] for i in running]
            keep_B = torch.tensor(running, device=device)
            cache, state = target.select(cache, keep_B), drafter.select(state, keep_B)
            lengths_B, last_B = lengths_B[keep_B], last_B[keep_B]

        began = _now(device)
        drafts_BK, draft_probs_BKV = drafter.propose(state, config.temperature, generator)
        drafted = _now(device)
        window_BT = torch.cat([last_B[:, None], drafts_BK], dim=1)
        positions_BT = lengths_B[:, None] + torch.arange(K + 1, device=device)
        span = max(len(prompts[row]) + len(results[row].tokens) for row in active) + K
        features = target.forward(cache, window_BT, positions_BT, span, drafter.request)
        logits_BTV = target.logits(features["last_hidden"])
        tokens_BT, counts_B = verify(
            logits_BTV, drafts_BK, draft_probs_BKV, config.temperature, generator
        )
        drafter.accept(state, tokens_BT, features, counts_B)
        rows = torch.arange(len(active), device=device)
        last_B, lengths_B = tokens_BT[rows, counts_B - 1], lengths_B + counts_B
        counts, tokens = counts_B.tolist(), tokens_BT.tolist()  # the round's one transfer
        clock.draft += drafted - began
        clock.verify += _now(device) - drafted
        clock.rounds += 1
        for i, row in enumerate(active):
            _append(results[row], tokens[i][: counts[i]], K, target, config)


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


def settle(
    target: TargetModel,
    drafter: Drafter,
    prompt: list[int],
    decoded: Decoded,
    reference: list[int],
    config: EvalConfig,
    clock: Clock,
) -> list[Tie]:
    """Compare a greedy decoding with the target's own; resolve ties, raise on anything else.

    Batched cached decoding and `generate` round differently. So the prefix of the first difference
    is recomputed in the next wider type (fp64 for an fp32 target, else fp32): a top-2 gap under the
    bound is a tie, and decoding goes on from the target's token. A wider gap is an error.
    """
    ties: list[Tie] = []
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
        (more,) = speculate(target, drafter, [prefix], rest, clock)
        decoded.tokens += more.tokens
        decoded.accepted += [0, *more.accepted]  # its first token was verified as well: a round
        decoded.room += [0, *more.room]
    return ties


def plain_step_seconds(
    target: TargetModel, prompts: Sequence[Sequence[int]], steps: int = 8
) -> float:
    """Time one plain decoding step of the target at this batch, the median of a few."""
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    longest = int(lengths_B.max())
    cache = target.allocate(len(prompts), longest + steps)
    token_B1 = torch.zeros(len(prompts), 1, dtype=torch.long, device=target.device)
    request, seconds = FeatureRequest((), True, "float32"), []
    for step in range(steps):
        began = _now(target.device)
        positions_B1 = lengths_B[:, None] + step
        features = target.forward(cache, token_B1, positions_B1, longest + step + 1, request)
        token_B1 = target.logits(features["last_hidden"]).argmax(-1)
        seconds.append(_now(target.device) - began)
    return sorted(seconds)[len(seconds) // 2]


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
