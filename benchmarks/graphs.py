"""Time capture and decoding eagerly and through graphs; prints each figure as soon as it is known.

    python benchmarks/graphs.py [--only small,large,eval] [--seconds 330]

Capture: one forward of 64-token prompts at 1, 8 and 32 rows through the runner that `draftcore
capture` uses, for the quickstart's target and for a random Llama of a billion parameters, bf16.
Decoding: tokens per second of `draftcore eval` with an EAGLE-3 draft that learned for a minute's
fraction, 1 and 32 prompts at a time. Ratios are to eager in the same process. What is left when the
seconds are spent is named and left out; compiling comes last, as it takes longest.

`--device cpu --backends eager,recording` tries it without a GPU, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftcore.binding import bind
from draftcore.config import load_config
from draftcore.data.dataset import read_prompts
from draftcore.drafts import find_checkpoint, load_checkpoint
from draftcore.evaluation.decode import Clock, speculate
from draftcore.graphs import GraphBackend
from draftcore.graphs.prefill import EagerPrefillRunner, PrefillGraphRunner, PrefillRunner
from draftcore.graphs.resolve import Phase
from draftcore.plugins import load
from draftcore.records import FeatureRequest
from draftcore.run import Run
from draftcore.target import TargetModel, TargetSpec
from draftcore.training.trainer import prepare, train

ROWS, LENGTH = (1, 8, 32), 64
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
COMPILED = "piecewise"
began = time.perf_counter()
given = argparse.Namespace()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="small,large,eval")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backends", default="eager,full,breakable,piecewise")
    parser.add_argument("--layers", type=int, default=BILLION["num_hidden_layers"])
    parser.parse_args(namespace=given)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}, prompts of {LENGTH} tokens")
    wanted, backends = given.only.split(","), given.backends.split(",")
    quick = [backend for backend in backends if backend != COMPILED]
    with tempfile.TemporaryDirectory() as folder:
        eager: dict[tuple[str, int], float] = {}
        targets = dict(open_targets(wanted, Path(folder)))
        for label, target in targets.items():
            for backend in quick:
                time_capture(label, target, backend, eager)
        if "eval" in wanted:
            time_decoding([b for b in quick if b != "breakable"], Path(folder))
        for label, target in targets.items():
            if COMPILED in backends:
                time_capture(label, target, COMPILED, eager)
    say("done")


def open_targets(wanted: list[str], folder: Path) -> Iterator[tuple[str, TargetModel]]:
    if "small" in wanted:
        yield "small", opened(QUICKSTART / "target")
    if "large" in wanted:
        config = LlamaConfig(**{**BILLION, "num_hidden_layers": given.layers})
        with torch.device(given.device):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / "large")
        say(f"large: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")
        del model
        yield "large", opened(folder / "large")


def opened(path: Path) -> TargetModel:
    return TargetModel(TargetSpec(str(path), dtype="bfloat16", device=given.device))


def time_capture(
    label: str, target: TargetModel, name: str, eager: dict[tuple[str, int], float]
) -> None:
    """Milliseconds of a forward per number of rows; what recording took, in seconds and memory."""
    depth = target.spec.num_layers
    request = FeatureRequest((1, depth // 2, depth - 2), True, "bfloat16")
    runner, backend = prefill(target, name)
    allocated, reserved = memory()
    recorded = 0.0
    for rows in reversed(ROWS):  # the largest first, as runs do
        if late(f"{label} {name}, {rows} rows"):
            continue
        tokens_BT = torch.randint(3, 4000, (rows, LENGTH), device=target.device)
        lengths_B = torch.full((rows,), LENGTH, device=target.device)
        if isinstance(runner, PrefillGraphRunner):  # one bucket, so that a late one is left out
            runner.phase = dataclasses.replace(runner.phase, rows=(rows,))
        work = lambda t=tokens_BT, n=lengths_B: runner.features(t, n, request)  # noqa: E731
        recorded += timed(work)
        took = 1e3 * statistics.median(timed(work) for _ in range(20))
        base = eager.setdefault((label, rows), took)
        say(f"{label} {name}, {rows} rows: {took:.2f} ms, {base / took:.2f} x eager")
    if backend is not None:
        now = memory()
        held = f"{now[0] - allocated:.0f} MiB held, {now[1] - reserved:.0f} MiB reserved"
        say(f"{label} {name}: recorded in {recorded:.1f} s, {held}; {dict(runner.counts)}")
        runner.forget()


def prefill(target: TargetModel, name: str) -> tuple[PrefillRunner, GraphBackend | None]:
    if name == "eager":
        return EagerPrefillRunner(target), None
    binding = bind(load(), "graph", name)
    backend = binding.hook.graph_backend(name=name, options=binding.options({}))
    phase = Phase("prefill", name, rows=ROWS, lengths=(LENGTH,))
    breaks = "breaks" in binding.capabilities
    return PrefillGraphRunner(target, phase, backend, breaks=breaks), backend


def time_decoding(backends: list[str], folder: Path) -> None:
    """Tokens per second of decoding with a draft, per number of prompts decoded together."""
    settings = [
        f"run={folder / 'run'}",
        "store=memory",
        f"target.path={QUICKSTART / 'target'}",
        f"target.device={given.device}",
        "target.dtype=bfloat16",
        f"train.device={given.device}",
        f"data.train={QUICKSTART / 'data' / 'train.jsonl'}",
        f"data.eval={QUICKSTART / 'data' / 'eval.jsonl'}",
        "data.limit=300",
        "train.epochs=1",
    ]
    run = Run(load_config(QUICKSTART / "eagle3.yaml", settings), load())
    train(run, prepare(run))
    run.close()
    say("eval: a draft is trained")
    for batch in (1, 32):
        base = 0.0
        for name in backends:
            if late(f"eval {name}, {batch} prompts"):
                continue
            own = [f"graphs.decode.backend={name}", f"eval.batch={batch}", "eval.max_new_tokens=64"]
            run = Run(load_config(QUICKSTART / "eagle3.yaml", [*settings, *own]), load())
            rate, rounds, reserved = decoding_rate(run, batch)
            run.close()
            base = base or rate
            say(
                f"eval {name}, {batch} prompts: {rate:.0f} tokens/s, {rate / base:.2f} x eager; "
                f"{rounds:.2f} ms a round, {reserved:.0f} MiB reserved"
            )


def decoding_rate(run: Run, batch: int) -> tuple[float, float, float]:
    """Tokens per second, milliseconds of a round, and what was reserved meanwhile, in MiB."""
    (draft,), config, target = run.drafts, run.config.eval, run.target.model
    built = load_checkpoint(draft, find_checkpoint(draft, None))
    built.module.to(target.device).eval()
    assert run.config.data.eval is not None
    found, _ = read_prompts(run.config.data.eval, run.target.tokenizer, max(batch, 8), 512)
    prompts = [list(prompt.token_ids) for prompt in found]
    batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    _, before = memory()
    runner = draft.decoder(built)
    drafter, longest = runner.drafter, max(map(len, prompts))
    runner.reserve(batch, longest + config.max_new_tokens + drafter.num_drafts + 1)
    speculate(target, drafter, batches[0], config, Clock(), 0, runner)  # records
    clock, tokens, started = Clock(), 0, time.perf_counter()
    for group in batches * (4 if batch > 1 else 1):
        tokens += sum(
            len(d.tokens) for d in speculate(target, drafter, group, config, clock, 0, runner)
        )
    seconds = time.perf_counter() - started
    return tokens / seconds, 1e3 * seconds / clock.rounds, memory()[1] - before


def timed(work: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    if given.device == "cuda":
        torch.cuda.synchronize()


def memory() -> tuple[float, float]:
    """MiB that tensors hold and that torch reserved for more of them."""
    if given.device != "cuda":
        return 0.0, 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20


def late(what: str) -> bool:
    if time.perf_counter() - began < given.seconds:
        return False
    say(f"{what}: left out, the time is spent")
    return True


def say(line: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)


if __name__ == "__main__":
    main()
