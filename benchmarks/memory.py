"""Compare what `step_memory` says of a step with what it takes on CUDA, one JSON line per case.

    python benchmarks/memory.py [--mode eager|compiled] [CASE ...]

A case is ALGORITHM:ROWSxTOKENS, as in `step.py`, of a target of Qwen3-8B's sizes that has a config alone:
`eagle3:2x2048`. Every token is learned, in bf16 over fp32 masters; drafts have 32,000 tokens, or 512 anchors
a row. `measured_gib` is the peak of the second of three steps with AdamW's state.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from draftcore_tools.memory import step_memory, zero_sample

from draftcore import open_run
from draftcore.contracts.algorithm import DataSummary, StepContext
from draftcore.training.compiled import Compiled
from draftcore.training.loop import collate
from draftcore.training.optimizer import build_optimizer

CASES = ("eagle3:1x2048", "eagle3:2x2048", "dflash:1x2048", "dflash:2x1024", "domino:1x2048")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
OPTIONS = {"eagle3": {"draft_vocab_size": 32000}}
BLOCKS = {"num_anchors": 512, "mask_token_id": 151669}


def measured(draft: Any, masks: list[torch.Tensor], compiled: bool) -> int:
    """Take three steps and return the peak of the last ones."""
    run, hook, asked = draft.run, draft.algorithm.hook, {"options": draft.options}
    target, cuda = copy.copy(run.target), torch.device("cuda")
    table, head = (
        0.02 * torch.randn(target.vocab_size, run.width, dtype=target.dtype) for _ in range(2)
    )
    vars(target).update(embedding=lambda: table, head=lambda: head)
    summary = DataSummary("", len(masks), 1, 1, max(map(len, masks)), {})
    built = hook.build_draft(target=target, data=summary, **asked)
    built.module.to(cuda)
    optimizer = build_optimizer(built.parameter_groups, weight_decay=0.0, betas=(0.9, 0.999))
    if compiled:
        Compiled(built.module)
    request = hook.feature_request(target=target, **asked)
    samples = [zero_sample(request, run.width, mask).to(cuda) for mask in masks]
    samples = [
        type(sample)(sample.id, sample.token_ids_T.cpu(), mask, sample.features)
        for sample, mask in zip(samples, masks, strict=True)
    ]
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        batch = collate(draft, request, samples, cuda)
        with torch.autocast("cuda", torch.bfloat16):
            context = StepContext(1, 2, 0)
            output = hook.forward_loss(draft=built, batch=batch, context=context, **asked)
        output.numerator.backward()
        del batch, output
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--mode", choices=["eager", "compiled"], help="this one alone")
    given = parser.parse_args()
    for case in given.cases:
        name, _, shape = case.partition(":")
        rows, tokens = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
            run = {
                "run": f"{folder}/run",
                "target": {"path": folder},
                "algorithm": {"name": name, "options": OPTIONS.get(name, BLOCKS)},
                "train": {"precision": "bf16"},
            }
            (file := Path(folder) / "run.yaml").write_text(json.dumps(run))
            with open_run(file) as opened:
                draft, masks = opened.drafts[0], [torch.ones(tokens, dtype=torch.bool)] * rows
                began = time.perf_counter()
                held, peak = step_memory(draft, masks)
                line: dict[str, Any] = {
                    "case": case, "held_gib": round(held / 2**30, 2),
                    "estimate_gib": round(peak / 2**30, 2),
                    "estimate_s": round(time.perf_counter() - began, 1),
                }  # fmt: skip
                for mode in [given.mode] if given.mode else ["eager", "compiled"]:
                    torch._dynamo.reset()
                    torch.cuda.empty_cache()
                    real = measured(draft, masks, mode == "compiled")
                    line |= {f"{mode}_gib": round(real / 2**30, 2), mode: round(peak / real, 3)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
