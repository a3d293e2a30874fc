"""Whole runs at 8-billion-parameter shapes: what a step takes, and what of it is waiting.

    python benchmarks/pipeline.py [--tiny] [--steps 120] [VARIANT ...]

The target is random and Qwen3-8B-shaped, written to shared memory once; batches are 8 rows of about
1,000 tokens, or of 50 to 4,000 (`mixed`), half of them supervised; EAGLE-3, bf16. Each variant is
`draftcore train` in processes of its own. The first 20 steps do not count, nor do those that compile.
Variants: colocated, compiled (target and draft; so are domino and mixed), file (all is captured into a
durable store first, which then feeds), producer (one, and one trainer), ranks (two), both compiled, mixed,
mixed-tokens (batches cut by tokens), mixed-ranks. `start` is compiled, with empty caches and then a
second time. Below each line stands where the time to the first step went.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from draftcore_sdk.targets import byte_tokenizer
from safetensors.torch import save_file

FOLDER = Path("/dev/shm/draftcore-pipeline")  # the target's 16 GB are read at memory speed
FIRST = 20  # steps that do not count
STARTED = 25  # steps of a start that is measured: those that compile are among them
OBSERVER = """
import json, resource
from draftcore import hookimpl

@hookimpl
def run_finished(run, step, reason):
    import torch
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (run / "peak.json").write_text(json.dumps([peak, host]))
"""
MIXED = "data.train={folder}/mixed.jsonl"
COMPILED = ["runner.prefill.name=compiled", "train.compile=on"]  # target and draft
VARIANTS: dict[str, list[str]] = {
    "colocated": [],
    "compiled": COMPILED,
    "domino": ["algorithm.name=domino", "algorithm.options={{}}", *COMPILED],
    "file": ["store=file:{folder}/features"],
    "producer": ["topology.producers=1"],
    "ranks": ["topology.ranks=2", "train.accumulate=2"],
    "compiled-ranks": ["topology.ranks=2", "train.accumulate=2", *COMPILED],
    "compiled-producer": ["topology.producers=1", *COMPILED],
    "mixed": [MIXED, *COMPILED],
    "mixed-tokens": [MIXED, "train.batch=256", "train.batch_tokens=8192", *COMPILED],
    "mixed-ranks": [MIXED, "topology.ranks=2", "train.accumulate=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a small target, for a try on a CPU")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    given = parser.parse_args()
    try:
        config = prepare(given.tiny, given.steps)
        print(
            f"matrix products of the target, 8 x 1,000 tokens: {products(config):.3f} s", flush=True
        )
        print(
            "variant           step  mean  wait  rows/s  tokens/s  device GiB  host GiB  whole s  "
            "first step s  graphs",
            flush=True,
        )
        for variant in given.variants:
            if variant == "start":
                starts(config)
            else:
                measure(variant, config)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def measure(variant: str, config: Path) -> None:
    run = FOLDER / "runs" / variant
    changes = [change.format(folder=FOLDER) for change in VARIANTS[variant]]
    verb = [sys.executable, "-m", "draftcore", "--plugin", str(FOLDER / "peak.py"), "train"]
    began = time.perf_counter()
    done = subprocess.run(
        [*verb, str(config), f"run={run}", *changes],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    whole = time.perf_counter() - began
    if done.returncode:
        print(f"{variant}: {done.stdout[-2000:]}", flush=True)
        return
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    graphs = [0, *(line.get("compilations", 0) for line in lines)]
    start = {name[6:]: value for name, value in lines[0].items() if name.startswith("start_")}
    lines = [line for at, line in enumerate(lines) if graphs[at] == graphs[at + 1]]
    lines = lines[min(FIRST, len(lines) // 2) :]
    step, wait = [one["seconds"] for one in lines], [one["fetch_seconds"] for one in lines]
    tokens = sum(one["tokens"] for one in lines)
    rows = float("nan") if "tokens" in variant else 8 * (2 if variant.endswith("ranks") else 1)
    device, host = json.loads((run / "peak.json").read_text())
    mean = statistics.mean(step)
    print(
        f"{variant:17} {statistics.median(step):.3f}  {mean:.3f} {statistics.median(wait):.3f} "
        f"{rows / mean:7.1f} {tokens / sum(step):9,.0f} {device / 2**30:9.1f} "
        f"{host / 2**30:9.1f} {whole:9.0f} {sum(start.values()):13.1f} {graphs[-1]:7.0f}\n"
        f"  {', '.join(f'{phase} {seconds:.1f}' for phase, seconds in start.items())}",
        flush=True,
    )
    shutil.rmtree(run)


def starts(config: Path) -> None:
    """Start a compiled run with empty caches, and once more; print its phases and which steps compiled."""
    caches = {"HOME": str(FOLDER / "home"), "XDG_CACHE_HOME": str(FOLDER / "home" / ".cache")}
    for start in ("cold", "second"):
        run = FOLDER / "runs" / start
        verb = [sys.executable, "-m", "draftcore", "train", str(config), f"run={run}", *COMPILED]
        done = subprocess.run(
            [*verb, f"train.max_steps={STARTED}"], env={**os.environ, **caches},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(f"{start}: {done.stdout[-2000:]}", flush=True)
            return
        told = [line for line in done.stdout.splitlines() if line.startswith("first step after")]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["seconds"] for line in lines]
        slow = [
            f"{i} ({s:.0f} s)"
            for i, s in enumerate(seconds, 1)
            if s > 1 + statistics.median(seconds)
        ]
        print(
            f"{start}: {told[0]}; {lines[-1].get('compilations', 0):.0f} graphs of the draft, step "
            f"{statistics.median(seconds):.3f} s, slow steps: {', '.join(slow)}; "
            f"last loss {lines[-1]['loss']!r}",
            flush=True,
        )
        shutil.rmtree(run)


def prepare(tiny: bool, steps: int) -> Path:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_target(FOLDER / "target", tiny)
    chosen, rows = random.Random(0), 16 * steps
    for name, lengths in (
        ("train", [chosen.randint(800, 1200) for _ in range(rows)]),
        ("mixed", [int(50 * 80 ** chosen.random()) for _ in range(rows)]),
    ):
        with (FOLDER / f"{name}.jsonl").open("w") as file:
            for length in lengths:
                said = text(chosen, length // (10 if tiny else 1))
                half = len(said) // 2
                turns = [("user", said[:half]), ("assistant", said[half:])]
                row = [{"role": role, "content": content} for role, content in turns]
                print(json.dumps({"messages": row}), file=file)
    (FOLDER / "peak.py").write_text(OBSERVER)
    options: dict[str, Any] = (
        {"layers": [1, 2, 3], "draft_vocab_size": 200} if tiny else {"draft_vocab_size": 32000}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {
        "run": str(FOLDER / "run"),
        "target": {"path": str(FOLDER / "target"), "device": device},
        "data": {"train": str(FOLDER / "train.jsonl"), "max_length": 4096},
        "algorithm": {"name": "eagle3", "options": options},
        "train": {
            "batch": 8, "max_steps": steps, "log_every": 1, "device": device,
            "precision": "bf16", "checkpoint_every": 10**6, "lr": 1e-4,
        },
    }  # fmt: skip
    run = FOLDER / "run.yaml"
    run.write_text(yaml.safe_dump(config))
    return run


def text(chosen: random.Random, length: int) -> str:
    return "".join(chosen.choices("abcdefghij klmnopqrstuvwxyz", k=max(length, 8)))


def write_target(folder: Path, tiny: bool) -> None:
    """Write a random model with a byte-level tokenizer, tensor by tensor, in files of some GB."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 40960,
    }  # fmt: skip
    if tiny:
        shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
        shape |= {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**shape, dtype="bfloat16", architectures=["Qwen3ForCausalLM"])
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    folder.mkdir()
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names, part, size, index = list(model.state_dict().items()), {}, 0, {}
    for name, meta in names:
        value = torch.empty(meta.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        part[name] = (torch.ones_like(value) if "norm" in name else value).cpu()
        size += value.nbytes
        if size > 3 << 30 or name == names[-1][0]:
            file = f"model-{len(set(index.values())):05}.safetensors"
            save_file(part, folder / file)
            index |= dict.fromkeys(part, file)
            part, size = {}, 0
    listed = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(listed)


def products(config: Path) -> float:
    """Seconds of the target's matrix products alone, for a batch of 8 rows of 1,000 tokens."""
    from transformers import AutoConfig

    if not torch.cuda.is_available():
        return float("nan")
    c = AutoConfig.from_pretrained(yaml.safe_load(config.read_text())["target"]["path"])
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = [(c.hidden_size, heads + 2 * kv), (heads, c.hidden_size)]
    shapes += [(c.hidden_size, 2 * c.intermediate_size), (c.intermediate_size, c.hidden_size)]
    given: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pairs = [(torch.randn(8000, a, **given), torch.randn(a, b, **given)) for a, b in shapes]
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(c.num_hidden_layers):
            for left, right in pairs:
                left @ right
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


if __name__ == "__main__":
    main()
