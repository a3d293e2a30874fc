"""Measure graphs against eager; prints each figure as soon as it is known.

    python benchmarks/graphs.py [--only small,large,eval,trace,overlap,bits,growth] [--seconds 290]

`small` and `large`: one forward of 64-token prompts at 1, 8 and 32 rows through the runner that
`draftcore capture` uses, for the quickstart's target and for a random Llama of a billion
parameters, bf16, and the memory of the graphs. `eval`: tokens per second of `draftcore eval` with an
EAGLE-3 draft that learned for a minute's fraction, 1 and 32 prompts at a time. `trace`: what a
forward launches. `overlap`: prefill by halves on two streams beside the whole. `bits`: replay against
eager on the same padded batch, for every bucket of both phases. `growth`: memory over many replays
and captures.

Ratios are to eager in the same process. What is left when the seconds are spent is named and left
out; compiling comes last, as it takes longest. A first try without a GPU, which says nothing about speed:

    python benchmarks/graphs.py --device cpu --backends eager,recording --rows 1,3 --length 8
        --layers 8 --replays 3 --samples 16
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from billion import LAYERS, QUICKSTART, random_llama
from draftcore_eval.decode import Clock, speculate
from draftcore_eval.evaluation import Decoding
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.graph_plugin import GraphPlugin
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.resolve import Phase
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_sdk.replays import largest_gap
from timing import Watch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from draftcore import bind, load_plugins, open_draft, open_run, train
from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenRun
from draftcore.contracts.runner import GraphBackend, ShapeKey
from draftcore.contracts.target import PrefillRunner, TargetModel

COMPILED = "piecewise"
HALVES = {"tbo": {}}
CYCLES = 20
SECTIONS = "small,large,eval,trace,overlap,bits,growth"
watch = Watch()
say, late = watch.say, watch.late
given = argparse.Namespace()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=SECTIONS)
    parser.add_argument("--targets", default="small,large", help="of the sections from eval on")
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backends", default="eager,full,breakable,piecewise")
    parser.add_argument("--rows", type=sizes, default=(1, 8, 32))
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--samples", type=int, default=300, help="that the draft of eval learns from"
    )
    parser.add_argument("--replays", type=int, default=1000)
    parser.parse_args(namespace=given)
    watch.seconds = given.seconds
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}, prompts of {given.length} tokens")
    with tempfile.TemporaryDirectory() as folder:
        measure(Targets(Path(folder)), given.only.split(","), given.backends.split(","))
    say("done")


def measure(targets: Targets, wanted: list[str], backends: list[str]) -> None:
    """Do what is wanted, what matters most first."""
    quick = [backend for backend in backends if backend != COMPILED]
    graphs = [backend for backend in quick if backend != "eager"]
    labels = given.targets.split(",")
    timed_too = [label for label in ("small", "large") if label in wanted]
    eager: dict[tuple[str, int], float] = {}
    for label in timed_too:
        for backend in quick:
            time_capture(label, targets, backend, eager)
    if "eval" in wanted:
        for label in labels:
            time_decoding(label, targets, [b for b in quick if b != "breakable"])
    if "trace" in wanted:
        for label, backend in itertools.product(labels, quick):
            count_launches(label, targets, backend)
    if "overlap" in wanted:
        forking = next(backend for backend in graphs if "forks" in capabilities(backend))
        for label in reversed(labels):
            time_overlap(label, targets, forking)
    if "bits" in wanted:
        for label, backend in itertools.product(labels, graphs):
            compare_prefill(label, targets, backend)
            compare_decoding(label, targets, backend)
    if "growth" in wanted:
        for label, backend in itertools.product(labels, graphs):
            replay_often(label, targets, backend)
            capture_often(label, targets, backend)
    if COMPILED in backends:
        for label in timed_too:
            time_capture(label, targets, COMPILED, eager)


class Targets:
    """The targets by their labels, opened when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, TargetModel] = {}

    def __getitem__(self, label: str) -> TargetModel:
        if label not in self.opened:
            spec = TransformersTarget(str(self.path(label)), dtype="bfloat16", device=given.device)
            self.opened[label] = TransformersModel(spec)
        return self.opened[label]

    def path(self, label: str) -> Path:
        if label == "small":
            return QUICKSTART / "target"
        if not (self.folder / "large").exists():
            billions = random_llama(self.folder / "large", given.device, given.layers)
            say(f"large: {billions:.2f} billion parameters")
        return self.folder / "large"


# ---------------------------------------------------------------- capture


def time_capture(
    label: str, targets: Targets, name: str, eager: dict[tuple[str, int], float]
) -> None:
    """Milliseconds of a forward per number of rows; what recording took, in seconds and memory."""
    target = targets[label]
    runner = prefill(target, name)
    before, recorded = memory(), 0.0
    for rows in reversed(given.rows):  # the largest first, as runs do
        if late(f"{label} {name}, {rows} rows"):
            continue
        work = forward_of(runner, target, rows)
        recorded += timed(work)
        took = 1e3 * statistics.median(timed(work) for _ in range(20))
        base = eager.setdefault((label, rows), took)
        say(f"{label} {name}, {rows} rows: {took:.2f} ms, {base / took:.2f} x eager")
    if isinstance(runner, PrefillGraphRunner):
        counts, held = dict(runner.counts), grown(before)
        runner.forget()
        say(f"{label} {name}: recorded in {recorded:.1f} s; {counts}")
        say(f"{label} {name}: graphs take {held}; after cleanup {grown(before)}")


def forward_of(
    runner: PrefillRunner, target: TargetModel, rows: int
) -> Callable[[], dict[str, Tensor]]:
    """A forward of full rows; a graph runner gets this one bucket, so that a late one is left out."""
    tokens_BT, lengths_B = full_rows(target, rows)
    if isinstance(runner, PrefillGraphRunner):
        runner.phase = dataclasses.replace(runner.phase, rows=(rows,))
    return lambda: runner.features(tokens_BT, lengths_B, request_of(target))


def full_rows(target: TargetModel, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tokens_BT = torch.randint(3, 4000, (rows, given.length), generator=generator)
    return tokens_BT.to(target.device), torch.full((rows,), given.length, device=target.device)


def request_of(target: TargetModel) -> FeatureRequest:
    depth = target.spec.num_layers
    layers = sorted({min(1, depth - 1), depth // 2, max(0, depth - 2)})
    return FeatureRequest(tuple(layers), True, "bfloat16")


def prefill(
    target: TargetModel, name: str, plugins: Mapping[str, Mapping[str, Any]] = {}
) -> PrefillRunner:
    if name == "eager":
        return target
    phase = Phase("prefill", name, rows=given.rows, lengths=(given.length,))
    breaks = "breaks" in capabilities(name)
    return PrefillGraphRunner(target, phase, opened(name), graph_plugins(plugins), breaks=breaks)


def capabilities(name: str) -> frozenset[str]:
    """Return the capabilities of a graph backend."""
    return bind(load_plugins(), "graph", name).capabilities


def opened(name: str) -> GraphBackend:
    binding = bind(load_plugins(), "graph", name)
    return binding.hook.graph_backend(name=name, options=binding.options)


def graph_plugins(plugins: Mapping[str, Mapping[str, Any]]) -> list[GraphPlugin]:
    bindings = {
        name: bind(load_plugins(), "graph-plugin", name, its) for name, its in plugins.items()
    }
    return [
        binding.hook.graph_plugin(name=name, options=binding.options)
        for name, binding in bindings.items()
    ]


# ---------------------------------------------------------------- decoding


def time_decoding(label: str, targets: Targets, backends: list[str]) -> None:
    """Tokens per second of decoding with a draft, per number of prompts decoded together."""
    settings = [
        f"run={targets.folder / label}-run",
        f"target.path={targets.path(label)}",
        f"target.device={given.device}",
        "target.dtype=bfloat16",
        f"train.device={given.device}",
        f"data.train={QUICKSTART / 'data' / 'train.jsonl'}",
        f"data.eval={QUICKSTART / 'data' / 'eval.jsonl'}",
        f"data.limit={given.samples}",
        "train.epochs=1",
    ]
    train(QUICKSTART / "eagle3.yaml", *settings)
    say(f"eval {label}: a draft is trained")
    for batch in (1, 32):
        base = 0.0
        for name in backends:
            if late(f"eval {label} {name}, {batch} prompts"):
                continue
            decode = f"runner.decode={{name: graphs, options: {{backend: {name}}}}}"
            own = [decode, f"eval.batch={batch}", "eval.max_new_tokens=64"]
            with open_run(QUICKSTART / "eagle3.yaml", [*settings, *own]) as run:
                rate, rounds, more = decoding_rate(run, batch)
            base = base or rate
            say(
                f"eval {label} {name}, {batch} prompts: {rate:.0f} tokens/s, {rate / base:.2f} x eager; "
                f"{rounds:.2f} ms a round; caches and graphs take {more}"
            )


def decoding_rate(run: OpenRun, batch: int) -> tuple[float, float, str]:
    """Tokens per second, milliseconds of a round, and the memory that decoding took."""
    (draft,), evaluation, target = run.drafts, run.evaluation(), run.target.load_model()
    built, _ = open_draft(draft, None, None)
    built.module.to(target.device).eval()
    assert isinstance(evaluation, Decoding)
    prompts = [ids for ids in run.data.prompts(max(batch, 8)).token_ids if len(ids) <= 512]
    options = evaluation.options
    batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    before = memory()
    runner = evaluation.decoder(draft, built)
    drafter, longest = runner.drafter, max(map(len, prompts))
    runner.reserve(batch, longest + options.max_new_tokens + drafter.num_drafts + 1)
    speculate(runner, batches[0], options)  # records
    clock, tokens, started = Clock(), 0, time.perf_counter()
    for group in batches * (4 if batch > 1 else 1):
        tokens += sum(len(d.tokens) for d in speculate(runner, group, options, clock))
    seconds = time.perf_counter() - started
    return tokens / seconds, 1e3 * seconds / clock.rounds, grown(before)


# ---------------------------------------------------------------- what is launched


def count_launches(label: str, targets: Targets, name: str) -> None:
    """Count the CUDA calls of one forward that launch something, as torch's profiler sees them."""
    if late(f"trace {label} {name}"):
        return
    rows, target = given.rows[len(given.rows) // 2], targets[label]
    runner = prefill(target, name)
    work = forward_of(runner, target, rows)
    work()  # records
    work()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (given.device == "cuda")
    with profile(activities=kinds) as trace:
        work()
        wait()
    calls = [event.name for event in trace.events() if event.name.startswith("cu")]
    found = Counter("graph" if "Graph" in call else "kernel" for call in calls if "Launch" in call)
    say(
        f"trace {label} {name}, {rows} rows: {found['graph']} graph and {found['kernel']} kernel launches"
    )
    forget(runner)


# ---------------------------------------------------------------- two halves


def time_overlap(label: str, targets: Targets, name: str) -> None:
    """Prefill by halves beside the whole, each in turn, and how far they differ."""
    for rows in reversed(given.rows):
        if late(f"overlap {label} {name}, {rows} rows"):
            continue
        target = targets[label]
        runners = [prefill(target, name), prefill(target, name, HALVES)]
        whole, halves = (forward_of(runner, target, rows) for runner in runners)
        pairs = [(own, halves()[key]) for key, own in whole().items()]
        gap = max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)
        times = [(timed(whole), timed(halves)) for _ in range(20)]
        one, other = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        say(
            f"overlap {label} {name}, {rows} rows: halves {other:.2f} ms, {one / other:.2f} x the whole "
            f"({one:.2f} ms); largest difference {gap:.2g} of the largest number"
        )
        for runner in runners:
            forget(runner)


# ---------------------------------------------------------------- bits


class Repeats:
    """A drafter without weights: it proposes the last token again and again."""

    def __init__(self, target: TargetModel) -> None:
        self.target, self.num_drafts = target, 3
        self.request, self.module = request_of(target), nn.Module()

    def allocate(self, batch: int, max_len: int) -> dict[str, Tensor]:
        return {"last_B": torch.zeros(batch, dtype=torch.long, device=self.target.device)}

    def prefill(self, state: Any, tokens: Any, lengths: Any, features: Any, next_B: Tensor) -> None:
        state["last_B"].copy_(next_B)

    def propose(self, state: Any, temperature: float = 0.0, generator: Any = None) -> Proposal:
        return Proposal(state["last_B"][:, None].expand(-1, self.num_drafts))

    def accept(self, state: Any, tokens_BK: Tensor, features: Any, counts_B: Tensor) -> None:
        state["last_B"].copy_(tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0])

    def select(self, state: Any, rows_B: Tensor) -> dict[str, Tensor]:
        return {"last_B": state["last_B"][rows_B]}


def compare_prefill(label: str, targets: Targets, name: str) -> None:
    if late(f"bits {label} {name}, prefill"):
        return
    target = targets[label]
    runner = prefill(target, name)
    assert isinstance(runner, PrefillGraphRunner)
    gaps = []
    for rows in given.rows:
        runner.features(*full_rows(target, rows), request_of(target))
        key = ShapeKey(rows, given.length, ",".join(request_of(target).names))
        gaps.append(largest_gap(runner, key))
    say(f"bits {label} {name}, prefill: {len(gaps)} buckets, largest difference {max(gaps):g}")
    runner.forget()


@torch.inference_mode()
def compare_decoding(label: str, targets: Targets, name: str) -> None:
    if late(f"bits {label} {name}, decode"):
        return
    target, most = targets[label], max(given.rows)
    lengths = (2 * given.length, 4 * given.length)
    phase, drafter = Phase("decode", name, rows=given.rows, lengths=lengths), Repeats(target)
    runner = DecodeGraphRunner(target, drafter, drafter.module, phase, opened(name))
    runner.reserve(most, lengths[-1])
    runner.ready(runner.keys())
    gaps = []
    for key in sorted(runner.captured):
        runner.admit(most, *full_rows(target, most))
        gaps.append(largest_gap(runner, key))
    say(f"bits {label} {name}, decode: {len(gaps)} buckets, largest difference {max(gaps):g}")
    runner.forget()


# ---------------------------------------------------------------- growth


def replay_often(label: str, targets: Targets, name: str) -> None:
    if late(f"growth {label} {name}, replays"):
        return
    target = targets[label]
    runner = prefill(target, name)
    work = forward_of(runner, target, given.rows[0])
    work()
    work()
    before = memory()
    for _ in range(given.replays):
        work()
    say(f"growth {label} {name}: {given.replays} replays take {grown(before)} more")
    forget(runner)


def capture_often(label: str, targets: Targets, name: str) -> None:
    if late(f"growth {label} {name}, captures"):
        return
    target = targets[label]
    runner = prefill(target, name)
    assert isinstance(runner, PrefillGraphRunner)
    work, before = forward_of(runner, target, given.rows[0]), memory()
    for cycle in range(CYCLES):
        work()
        runner.forget()
        if cycle == 2:  # libraries have their work space now
            before = memory()
    say(f"growth {label} {name}: {CYCLES} captures and cleanups take {grown(before)} more")


# ---------------------------------------------------------------- clocks and memory


def timed(work: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    if given.device == "cuda":
        torch.cuda.synchronize()


def memory() -> tuple[int, int]:
    """Bytes that tensors hold and that torch reserved for more of them; zeros without CUDA."""
    gc.collect()
    if given.device != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def grown(before: tuple[int, int]) -> str:
    held, reserved = (now - then for now, then in zip(memory(), before, strict=True))
    return f"{held:,} bytes held, {reserved:,} reserved"


def forget(runner: PrefillRunner) -> None:
    if isinstance(runner, PrefillGraphRunner):
        runner.forget()


def sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in text.split(",")))


if __name__ == "__main__":
    main()
