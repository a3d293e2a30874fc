"""What capturing beside training gains: steps per second with train.overlap off and on, in turn.

    python benchmarks/overlap.py [--only small,large,long] [--prefill full]

Colocated runs that keep features in memory and capture each sample once, for the quickstart's target
and for a random Llama of a billion parameters, with an EAGLE-3 draft, bf16; `long` has the latter read
samples of some 1,600 tokens, where `small` and `large` have the quickstart's of 140. A step is captured
and trained one after the other where overlap is off: what the two take alone bounds what overlap can
gain. Ratios are of runs in one process that take turns. Before them a run is traced, and it is
computed how long kernels of two streams ran at once. Prints each figure as soon as it is known; what
is left when the seconds are spent is named and left out.

`--device cpu --only small,large --steps 27 --batch 1 --layers 8 --width 128 --rounds 1` tries it
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from billion import LAYERS, QUICKSTART, WIDTH, random_llama
from draftcore_sdk.streams import busy_streams
from draftcore_sdk.targets import conversations
from timing import Watch
from torch.profiler import ProfilerActivity, profile

from draftcore.config import load_config
from draftcore.contracts.algorithm import Sample
from draftcore.contracts.channel import PlannedStep
from draftcore.plugins.registry import load
from draftcore.run.parts import Run
from draftcore.run.trainer import Trainer, prepare, train

SKIPPED = 20  # steps at the beginning: loading, first captures, a new stream's pool of memory
TRACED = range(12, 18)  # steps
JOINED = 11  # answers of the quickstart's data in a long sample
watch = Watch()
say, late = watch.say, watch.late
given = argparse.Namespace()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="small,large,long")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help=f"more than {TRACED.stop}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--prefill", default="eager", help="graph backend of the captures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.parse_args(namespace=given)
    watch.seconds = given.seconds
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}, {given.steps} steps of {given.batch} samples")
    with tempfile.TemporaryDirectory() as folder:
        for label, settings in targets(given.only.split(","), Path(folder)):
            if not late(f"{label}: the trace"):
                trace(label, settings, Path(folder))
            compare(label, settings, Path(folder))
    say("done")


def targets(wanted: list[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The targets by label, each with its settings."""
    if "small" in wanted:
        yield "small", [f"target.path={QUICKSTART / 'target'}"]
    if {"large", "long"} & set(wanted):
        billions = random_llama(folder / "large", given.device, given.layers, given.width)
        say(f"large: {billions:.2f} billion parameters")
        draft = "algorithm.options.intermediate_size=null", "algorithm.options.ttt_length=7"
        settings = [f"target.path={folder / 'large'}", *draft]
        if "large" in wanted:
            yield "large", settings
        if "long" in wanted:
            long = f"data.train={long_samples(folder / 'long.jsonl')}"
            yield "long", [*settings, long, "data.max_length=2048"]


def long_samples(file: Path) -> Path:
    rows = map(json.loads, (QUICKSTART / "data" / "train.jsonl").read_text().splitlines())
    answers = [row["conversations"][-1]["content"] for row in rows]
    return conversations(
        file, ["\n".join(answers[at : at + JOINED]) for at in range(0, len(answers), JOINED)]
    )


# ---------------------------------------------------------------- one run


@dataclass
class Timed:
    """Seconds of each step: what it waited for its features, what it trained, and all in all."""

    waited: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Steps per second."""
        return (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])

    def keep(self, waited: float, trained: float) -> None:
        self.waited.append(waited)
        self.trained.append(trained)
        self.ends.append(time.perf_counter())


def run_once(
    settings: list[str],
    folder: Path,
    *,
    overlap: bool,
    before_step: Callable[[int], None] = lambda step: None,
) -> Timed:
    """Train a draft from nothing; returns the seconds of its steps after the first few."""
    kind = "bfloat16" if given.device == "cuda" else "float32"
    overrides = [
        f"run={folder / 'run'}",
        "store=memory",
        f"target.device={given.device}",
        f"target.dtype={kind}",
        f"data.train={QUICKSTART / 'data' / 'train.jsonl'}",
        f"data.limit={given.steps * given.batch}",
        f"train.device={given.device}",
        f"train.precision={'bf16' if given.device == 'cuda' else 'fp32'}",
        "train.epochs=1",
        f"train.batch={given.batch}",
        f"capture.batch={given.batch}",
        "train.checkpoint_every=1000000",
        f"train.overlap={str(overlap).lower()}",
        f"runner.prefill={{name: graphs, options: {{backend: {given.prefill}}}}}",
        *settings,
    ]
    run = Run(load_config(QUICKSTART / "eagle3.yaml", overrides), load())
    try:
        (trainer,) = prepare(run)
        timed = timed_by(trainer, before_step)
        train(run, [trainer])
    finally:
        run.close()
        shutil.rmtree(folder / "run")
    return timed


def timed_by(trainer: Trainer, before_step: Callable[[int], None]) -> Timed:
    """Note what each step takes, and call something before it."""
    timed, advance = Timed(), trainer.advance

    def noted(planned: PlannedStep, samples: Mapping[int, Sample], fetch_seconds: float) -> None:
        before_step(planned.index)
        started = time.perf_counter()
        advance(planned, samples, fetch_seconds)
        if planned.index >= SKIPPED:
            timed.keep(fetch_seconds, time.perf_counter() - started)

    trainer.advance = noted  # type: ignore[method-assign]
    return timed


# ---------------------------------------------------------------- the figures


def compare(label: str, settings: list[str], folder: Path) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(given.rounds):
        for overlap in (False, True):
            word = "on" if overlap else "off"
            if late(f"{label}, overlap {word}, round {turn + 1}"):
                return
            forget_peak()
            timed = run_once(settings, folder, overlap=overlap)
            rates[overlap].append(timed.rate)
            say(f"{label}, overlap {word}: {timed.rate:.2f} steps/s{peak()}")
            if not overlap:
                say(f"{label}: {bound(timed)}")
        gain = statistics.median(rates[True]) / statistics.median(rates[False])
        say(f"{label}: overlap gives {gain:.2f} x the steps/s, round {turn + 1}")


def bound(timed: Timed) -> str:
    capture, step = 1e3 * statistics.mean(timed.waited), 1e3 * statistics.mean(timed.trained)
    most = (capture + step) / max(capture, step)
    return (
        f"capture alone {capture:.1f} ms and step alone {step:.1f} ms, in sum {capture + step:.1f} ms: "
        f"overlap can give {most:.2f} x"
    )


def trace(label: str, settings: list[str], folder: Path) -> None:
    """Say how long kernels of two streams ran at once in a few steps of a run with overlap."""
    cuda = given.device == "cuda"
    tracer = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def before_step(step: int) -> None:
        if step == TRACED.start:
            tracer.start()
        elif step == TRACED.stop:
            if cuda:
                torch.cuda.synchronize()
            tracer.stop()

    run_once(settings, folder, overlap=True, before_step=before_step)
    tracer.export_chrome_trace(str(folder / "trace.json"))
    busy = busy_streams(folder / "trace.json")
    streams = ", ".join(f"stream {s}: {ms:.1f} ms" for (_, s), ms in busy.streams.items())
    say(
        f"{label}: in {len(TRACED)} steps kernels of several streams ran at once for "
        f"{busy.at_once:.2f} ms, {busy.share:.0%} of the less busy one's time "
        f"({streams or 'no kernels: a CPU has no streams'})"
    )


def forget_peak() -> None:
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> str:
    if given.device != "cuda":
        return ""
    held = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20
    return f", peak {held[0]:.0f} MiB held, {held[1]:.0f} MiB reserved"


if __name__ == "__main__":
    main()
