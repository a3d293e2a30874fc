"""Time training steps (forward and backward) at Qwen3-8B shapes on CUDA, one JSON line per case.

    python benchmarks/step.py [--mode eager|compiled] [--mask dense|half] [CASE ...]

A case is ALGORITHM:ROWSxTOKENS, for block drafts with anchors per row: `eagle3:1x2048`,
`dflash:2x768:256`. Random data, bf16 compute over fp32 masters; of the mask `half`, every other run of
64 tokens is supervised. A line has the median of ten steps by CUDA events, one after another as a trainer
runs them, peak memory, what the matrix products alone take at the device's measured bf16 rate (the cost
model in docs/performance.md), and the milliseconds of each family of kernels in one traced step. To put
another trainer beside it, time its step with `measure`.
"""

import argparse
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_dflash2.algorithm import DFlash2
from draftcore_dflash2.options import DFlash2Options
from draftcore_domino.algorithm import Domino
from draftcore_domino.options import DominoOptions
from draftcore_dspark.algorithm import DSpark
from draftcore_dspark.options import DSparkOptions
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.config import DraftConfig
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.config import MtpConfig
from draftcore_mtp.model import MtpDraft
from draftcore_mtp.options import MtpOptions
from draftcore_nn.batches import PaddedBatch
from draftcore_peagle.algorithm import PEagle
from draftcore_peagle.config import PEagleConfig
from draftcore_peagle.model import PEagleDraft
from draftcore_peagle.options import PEagleOptions
from draftcore_peagle.pairs import draw
from torch import nn

from draftcore.contracts.algorithm import Algorithm, Draft, DraftBatch, SampleId, StepContext
from draftcore.training.compiled import Compiled

WIDTH, VOCABULARY, DRAFT_VOCABULARY, INNER, DEPTH, STEPS = 4096, 151_936, 32_000, 12_288, 5, 7
MASK, TAPS = 151_669, (1, 17, 32)
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": INNER,
    "rms_norm_eps": 1e-6,
    "rope": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40_960,
}
BLOCKS: dict[str, Any] = {
    "layers": (1, 9, 17, 25, 33),
    "num_target_layers": 36,
    "mask_token_id": MASK,
    "layer_types": ("full_attention",) * DEPTH,
}
CASES = (
    "eagle3:1x2048",
    "eagle3:1x4096",
    "dflash:2x768:256",
    "dflash:1x2048:512",
    "domino:2x768:256",
    "dflash2:1x2048:512",
    "dspark:1x2048:512",
    "peagle:1x2048",
    "mtp:1x2048",
)
BLOCK_DRAFTS: dict[str, tuple[type[DFlash], Any]] = {
    "dflash": (DFlash, DFlashOptions),
    "dflash2": (DFlash2, DFlash2Options),
    "domino": (Domino, DominoOptions),
    "dspark": (DSpark, DSparkOptions),
}
AHEAD = {"eagle3": 1, "peagle": 1, "mtp": 2}  # rows at a sample's end that predict nothing
FAMILIES = {
    "products": r"gemm|nvjet|cutlass.*(bf16|tensorop)|xmma|cublas|splitK",
    "attention": r"flash|fmha|flex|attention|cudnn.*sdpa",
    "copies": r"copy|cat|Memcpy|Memset|fill",
}


def build(name: str, anchors: int) -> tuple[Algorithm, Any]:
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, device="cuda") * 0.02
    with torch.device("cuda"):
        if name in BLOCK_DRAFTS:
            kind, options_of = BLOCK_DRAFTS[name]
            options = options_of(num_anchors=anchors)
            # Of the sizes that the method adds, the shape's own are the options' as well.
            shape = kind.shape(**SIZES, **BLOCKS, block_size=options.block_size)
            return kind(options), drawn(kind.module(shape, options, table, table))
        if name == "mtp":
            mtp = MtpOptions(init="fresh")
            layer = MtpConfig(
                **SIZES, family="plain", num_target_layers=36, attention_bias=False, head_norms=True
            )
            return Mtp(mtp), drawn(MtpDraft(layer, mtp, table, table))
        given = {**SIZES, "draft_vocab_size": DRAFT_VOCABULARY, "layers": TAPS}
        ids = torch.arange(DRAFT_VOCABULARY)
        if name == "peagle":
            peagle = PEagleOptions()
            wide = PEagleConfig(**given, num_layers=peagle.num_layers, mask_token_id=MASK)
            return PEagle(peagle), drawn(PEagleDraft(wide, peagle, table, table, ids))
        eagle3 = Eagle3Options(ttt_length=STEPS)
        chain = Eagle3Draft(DraftConfig(**given), eagle3, table, table, ids)
        return Eagle3(eagle3), drawn(chain)


def drawn(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return module.cuda()


def random_batch(name: str, rows: int, length: int, mask: str) -> DraftBatch:
    learned = torch.ones(rows, length, dtype=torch.bool)
    if mask == "half":
        learned &= (torch.arange(length) // 64 % 2).bool()
    learned[:, length - AHEAD.get(name, 0) :] = False
    layers = BLOCKS["layers"] if name in BLOCK_DRAFTS else TAPS
    names = [f"hidden.{layer}" for layer in layers if name != "mtp"]
    names += ["last_hidden"] * (name in ("dspark", *AHEAD))
    shape = (rows, length, WIDTH)
    return PaddedBatch(
        ids=tuple(SampleId(str(row), 1) for row in range(rows)),
        token_ids_BT=torch.randint(VOCABULARY, (rows, length), device="cuda"),
        loss_mask_BT=learned.cuda(),
        attention_mask_BT=torch.ones_like(learned).cuda(),
        features={n: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n in names},
        host_mask_BT=learned,
        lengths=(length,) * rows,
    )


def operations(module: Any, name: str, batch: DraftBatch, anchors: int) -> float:
    """Of the products in docs/performance.md's cost model; a multiply-add counts 2.

    Backward is twice forward for a weight that learns and once for the frozen head. Of a mask with gaps
    it counts what has to be computed: rows with loss, and for EAGLE-3 and MTP those that lead to them.
    """
    tokens, head = batch.token_ids_BT.numel(), WIDTH * VOCABULARY
    if name in BLOCK_DRAFTS:
        return float(block_operations(module, name, tokens, len(batch.ids) * anchors))
    assert batch.host_mask_BT is not None
    learned = int(batch.host_mask_BT.sum())
    if name == "peagle":
        pairs = sum(len(anchor) for anchor, _ in draw(batch, module.options, seed=0))
        body = (tokens + pairs) * weights(module.midlayer, module.layers)
        body += (learned + pairs) * weights(module.lm_head) + tokens * weights(module.fc)
        return float(3 * 2 * body + 2 * learned * head)
    steps = module.options.steps if name == "mtp" else STEPS
    active = learned + int(learned < tokens / 2 + 1) * (tokens // 128) * (steps - 1)
    if name == "mtp":  # a half of fc reads tokens, once for all steps
        half = weights(module.mtp.fc) // 2
        body = steps * active * (weights(module.layer) + half) + tokens * half
        return float(3 * 2 * body + 2 * 2 * steps * learned * head)
    body = steps * (active * weights(module.midlayer) + learned * weights(module.lm_head))
    return float(3 * 2 * (body + tokens * weights(module.fc)) + 2 * learned * head)


def block_operations(module: Any, name: str, tokens: int, blocks: int) -> int:
    """Of a draft with DFlash's backbone: its layers, what else learns, and products with the head."""
    rows, head = blocks * int(module.config.block_size), WIDTH * VOCABULARY
    attention = module.layers[0].self_attn
    keys_values = weights(attention.k_proj, attention.v_proj)
    body = DEPTH * (rows * weights(module.layers[0]) + tokens * keys_values)
    body += tokens * weights(module.fc)
    if name == "domino":
        body += rows * weights(module.up)
    elif name == "dflash2":  # its convolutions are in the layers
        shape, selector = module.config, module.candidate_selector
        scores = shape.selector_rank * shape.selector_top_k
        body += rows * (weights(selector.hidden_projection) + scores)
    elif name == "dspark":
        body += rows * weights(module.markov_head.markov_w2, module.confidence_head)
    teacher = 2 * rows * head * (name == "dspark")
    return 3 * 2 * body + 2 * 2 * rows * head + teacher


def weights(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def bf16_rate() -> float:
    """Operations per second of a large product on this device."""
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    seconds = measure(lambda: x @ x)[0] / 1e3
    return 2 * 8192**3 / seconds


def measure(step: Callable[[], Any]) -> tuple[float, float]:
    """Return the median milliseconds of ten calls after three, and peak GiB."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(14)]
    torch.cuda.reset_peak_memory_stats()
    for mark in marks:
        mark.record()
        step()
    torch.cuda.synchronize()
    times = [began.elapsed_time(ended) for began, ended in pairwise(marks[3:])]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def families(step: Callable[[], Any], top: int) -> dict[str, float]:
    """Return milliseconds of kernels by family, and how many ran, in one call; prints the longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    found = Counter[str]()
    for event in sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)[:top]:
        print(f"{event.self_device_time_total / 1e3:8.2f} ms {event.count:5}  {event.key[:150]}")
    for event in traced.key_averages():
        kinds = (kind for kind, names in FAMILIES.items() if re.search(names, event.key, re.I))
        found[next(kinds, "others")] += event.self_device_time_total / 1e3
        found["kernels"] += event.count * (event.self_device_time_total > 0)
    return {kind: round(value, 2) for kind, value in found.most_common()}


def run(case: str, mode: str, mask: str, rate: float, top: int) -> dict[str, Any]:
    name, shape, *rest = case.split(":")
    rows, length = map(int, shape.split("x"))
    anchors = int(rest[0]) if rest else 0
    algorithm, module = build(name, anchors)
    draft = Draft(module, {}, None, [])  # type: ignore[arg-type]
    batch = random_batch(name, rows, length, mask)
    compiled = Compiled(module) if mode == "compiled" else None

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = algorithm.forward_loss(draft, batch, StepContext(2, 2, 0))
        output.numerator.backward()
        module.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first, (milliseconds, peak) = time.perf_counter() - began, measure(step)
    products = operations(module, name, batch, anchors)
    return {
        "case": case,
        "mode": mode,
        "mask": mask,
        "ms": round(milliseconds, 2),
        "products_ms": round(1e3 * products / rate, 2),
        "ratio": round(milliseconds / 1e3 * rate / products, 3),
        "tflops": round(products / milliseconds / 1e9, 1),
        "peak_gib": round(peak, 2),
        "first_s": round(first, 1),
        "compilations": compiled.compilations if compiled else 0,
        "families": families(step, top),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--mode", choices=["eager", "compiled"], help="this one alone")
    parser.add_argument("--mask", choices=["dense", "half"], help="this one alone")
    parser.add_argument("--top", type=int, default=0, help="kernels to name, by their time")
    given = parser.parse_args()
    rate = bf16_rate()
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "tflops": round(rate / 1e12)}))
    for case in given.cases:
        for mask in [given.mask] if given.mask else ["dense", "half"]:
            for mode in [given.mode] if given.mode else ["eager", "compiled"]:
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                try:
                    print(json.dumps(run(case, mode, mask, rate, given.top)), flush=True)
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"[:2000]
                    print(
                        json.dumps({"case": case, "mode": mode, "mask": mask, "error": said}),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
