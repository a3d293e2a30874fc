"""What a draft would gain on a server: acceptance as measured, and a model of what a round costs there.

A forward reads all weights once, and each request's keys and values; it multiplies every token with the
weights; and it takes a fixed time beside. The first is all there is for few requests, the second for many
(the two sides of the roofline model: Williams, Waterman and Patterson 2009); the times are added, as engines
overlap little of them. A round is the draft's forwards and one of the target over the drafts and the token
before them. It brings a token, and one for each position that is accepted (Leviathan et al. 2023, arXiv
2211.17192). Not modelled: several GPUs and what they tell each other, prefill, the draft's own keys and
values, how a server schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftcore.errors import plural

if TYPE_CHECKING:
    from torch import nn

    from draftcore.contracts.target import TargetModel
    from draftcore_eval.options import EvalOptions, Gpu

# By the makers' data sheets: dense bf16 FLOP/s, and bytes/s of memory.
GPUS = {
    "a10g": (70e12, 0.6e12),
    "a100": (312e12, 2.039e12),
    "a100-40gb": (312e12, 1.555e12),
    "b200": (2250e12, 8.0e12),
    "h100": (989e12, 3.35e12),
    "h200": (989e12, 4.8e12),
    "l4": (121e12, 0.3e12),
    "l40s": (362e12, 0.864e12),
    "mi300x": (1307e12, 5.3e12),
    "rtx3090": (71e12, 0.936e12),
    "rtx4090": (165e12, 1.008e12),
    "rtx5090": (210e12, 1.792e12),
}
# What a server's forwards reach of the two, and the seconds of each beside (launches, sampling, scheduling).
# So a plain step of Llama 3.1 8B for one request on an H100 is 6.3 ms, as sglang's documentation measured.
FLOPS_REACHED, BANDWIDTH_REACHED, FORWARD_SECONDS = 0.5, 0.75, 3e-4
REQUESTS, MOST_REQUESTS = (1, 8, 32, 128), 1024
SHOWN = (1, 2, 3, 4, 5, 7, 10, 15)  # numbers of drafts in the table
# What configs call the experts that a token takes, and those that there are.
TAKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Size:
    """What a forward multiplies tokens with, and reads.

    `experts` is the share of the parameters that are experts', of which a token takes the share `taken`;
    `token_bytes` are what a token keeps in the cache.
    """

    parameters: float
    parameter_bytes: float = 2.0
    experts: float = 0.0
    taken: float = 1.0
    token_bytes: float = 0.0

    @classmethod
    def of_target(cls, model: TargetModel) -> Size:
        """Count a target; one that is no torch module is taken to be dense, and of 16 bits."""
        spec = model.spec
        module: Any = getattr(model, "model", None)
        text, embedding = spec.text_config, (spec.vocab_size, int(spec.text_config.hidden_size))
        named = dict(module.named_parameters()) if hasattr(module, "named_parameters") else {}
        total = sum(p.numel() for p in named.values()) or spec.weight_bytes() / 2
        # Of an embedding that is not the head as well, rows are looked up.
        looked_up = max(0, sum(p.shape == embedding for p in named.values()) - 1)
        parameters = total - looked_up * embedding[0] * embedding[1]
        routed = sum(p.numel() for name, p in named.items() if ".experts." in name)
        taken, there = (
            next((n for key in names if (n := getattr(text, key, None))), 1)
            for names in (TAKEN, EXPERTS)
        )
        caches = (model.allocate(1, tokens) for tokens in (2, 1))
        two, one = (sum(x.numel() for layer in cache for x in layer) for cache in caches)
        return cls(
            parameters, spec.weight_bytes() / total, routed / parameters, taken / there,
            token_bytes=2 * (two - one),
        )  # fmt: skip

    @classmethod
    def of_draft(cls, module: nn.Module, spec: Any) -> Size:
        """Count a draft in 16 bits; one without a head of its own uses the target's."""
        named = dict(module.named_parameters())
        borrowed = 0 if any("head" in name for name in named) else spec.vocab_size
        borrowed *= int(spec.text_config.hidden_size)
        return cls(sum(p.numel() for p in named.values()) + borrowed)

    def seconds(self, gpu: Gpu, requests: int, tokens: int, context: float) -> float:
        """Return how long a forward over so many tokens of each request takes."""
        flops, bandwidth = GPUS[gpu]
        count, untaken = requests * tokens, 1 - self.taken
        read = self.parameters * self.parameter_bytes * (1 - self.experts * untaken**count)
        read += requests * context * self.token_bytes
        computed = 2 * self.parameters * (1 - self.experts * untaken) * count
        reading, computing = read / bandwidth / BANDWIDTH_REACHED, computed / flops / FLOPS_REACHED
        return FORWARD_SECONDS + reading + computing


def forecast(
    rates: Sequence[float], num_drafts: int, target: Size, draft: Size, *,
    parallel: bool, context: float, options: EvalOptions,
) -> dict[str, Any]:  # fmt: skip
    """Return how much faster a server would decode, by requests at once and number of drafts; JSON data.

    `rates` are the acceptance by position; they are fewer than drafts where these are a tree. A `parallel`
    draft writes a round in one forward, of a block that is as long as it was trained.
    """
    tree, gpu = len(rates) < num_drafts, options.gpu
    counts = [num_drafts] if tree else list(range(1, num_drafts + 1))

    def speed_up(requests: int) -> list[float]:
        plain = target.seconds(gpu, requests, 1, context)
        found = []
        for drafts in counts:
            passes, tokens = (1, drafts + 1) if parallel else (drafts, 1)
            round_ = passes * draft.seconds(gpu, requests, tokens, context)
            round_ += target.seconds(gpu, requests, drafts + 1, context)
            found.append((1 + sum(rates[:drafts])) * plain / round_)
        return found

    def chosen(gains: Sequence[float]) -> int:
        return -1 if parallel else gains.index(max(gains))

    gains = {n: speed_up(n) for n in sorted({*REQUESTS, options.requests})}
    everywhere = ((n, speed_up(n)) for n in range(1, MOST_REQUESTS + 1))
    faster = [n for n, found in everywhere if found[chosen(found)] > 1]
    return {
        "gpu": gpu,
        "requests": options.requests,
        "num_drafts": counts[chosen(gains[options.requests])],
        "trained_block": parallel,
        "faster_for": [faster[0], faster[-1]] if faster else None,
        "drafts": counts,
        "speed_up": {str(n): g for n, g in gains.items()},
        "context": context,
        "target_parameters": target.parameters,
        "draft_parameters": draft.parameters,
    }


def table(served: Mapping[str, Any]) -> list[list[str]]:
    """Return a forecast as cells: the numbers of drafts, then what each brings by requests at once."""
    counts = served["drafts"]
    shown = [at for at, n in enumerate(counts) if n in SHOWN or n == counts[-1]]
    rows = [["drafts a round", *(str(counts[at]) for at in shown), "best"]]
    for requests, gains in served["speed_up"].items():
        name = f"{plural(int(requests), 'request')} at once"
        best = str(counts[gains.index(max(gains))])
        rows.append([name, *(f"{gains[at]:.2f}x" for at in shown), best])
    return rows


def gain(served: Mapping[str, Any]) -> float:
    """Return how much faster a server would decode by the number of drafts that is advised."""
    gains = served["speed_up"][str(served["requests"])]
    return float(gains[served["drafts"].index(served["num_drafts"])])


def advice(served: Mapping[str, Any]) -> str:
    """Say how many drafts to serve, and where they stop paying."""
    drafts = f"{plural(served['num_drafts'], 'draft')} a round"
    if served["faster_for"] is None:
        return f"nothing: {drafts} would be slower than none, however many the requests"
    why = f"best for {plural(served['requests'], 'request')} at once"
    why = "as its block was trained" if served["trained_block"] else why
    first, last = served["faster_for"]
    until = f"{first} or more" if last == MOST_REQUESTS else f"{first} to {last}"
    return f"{drafts}: {why}; faster than none for {until} at once"


# ---------------------------------------------------------------- the commands


def commands(capabilities: Collection[str], target: str, draft: str, drafts: int) -> dict[str, str]:
    """Return by server the command that serves a draft of these capabilities; none for other servers.

    `served:SERVER` says that a server reads the export, `SERVER:NAME` by what name.
    """
    names = dict(word.partition(":")[::2] for word in sorted(capabilities))
    method, sglang = names.get("vllm", ""), names.get("sglang", "")
    parallel = ', "parallel_drafting": true' * ("parallel" in capabilities)
    chain = f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 "
    found = {
        "sglang": f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {sglang} --speculative-draft-model-path {draft} \\\n"
        f"    {chain * sglang.startswith('EAGLE')}--speculative-num-draft-tokens {drafts + 1}",
        "vllm": f"vllm serve {target} --speculative-config \\\n"
        f'    \'{{"method": "{method}", "model": "{draft}", "num_speculative_tokens": {drafts}'
        f"{parallel}}}'",
    }
    named = {server: names.get(server, "") for server in found}
    readable = [s for s, name in named.items() if name and ":" not in name]
    return {s: found[s] for s in readable if f"served:{s}" in capabilities}
