"""Steps of a colocated run beside a bare loop over the same samples: what the control plane costs.

Both loops take the trainer's own step on the same planned samples. The bare one has them in a
dictionary; the other gets them through feed, source, channel and store, as `draftcore train` does.
They take turns from the second epoch on. What is captured meanwhile is work and no control: its
time is left out, that of asking for it and announcing it is not.
"""

import dataclasses
import tempfile
import time
from pathlib import Path

from draftcore_sdk.targets import conversations, tiny_target
from report import ms, report, seconds

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import Sample
from draftcore.contracts.channel import CaptureTask
from draftcore.contracts.store import SampleRef
from draftcore.plugins.registry import load
from draftcore.run.parts import Run
from draftcore.run.trainer import Trainer, prepare

BATCH, SAMPLES, TOKENS = 4, 16, 250


def colocated(rounds: int) -> None:
    """The ratio of the two steps, and what a step spends outside of the trainer's."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(settings(Path(folder), epochs=2 + rounds), load())
        (trainer,) = prepare(run)
        run.feed.start(0, lambda: False, {})
        captures = timed_captures(run)
        ours, bare, control = measure(run, trainer, captures)
        run.close()
    step, alone, around = ms(ours), ms(bare), 1e3 * ms(control)
    measured = f"{step / alone - 1:+.1%}: {step:.2f} ms beside {alone:.2f} ms"
    report("colocated: a step beside a bare loop's", measured, "within 1 %", step <= 1.01 * alone)
    share = around / 1e3 / alone
    measured = f"{around:.0f} us, {share:.2%} of a step: {BATCH} samples of some {TOKENS} tokens"
    report("colocated: control plane of a step", measured, "<= 1 % of a step", share <= 0.01)


def timed_captures(run: Run) -> list[float]:
    """Have every capture add its seconds to a list."""
    seconds, capture = list[float](), run.producer.refs

    def refs(task: CaptureTask) -> tuple[SampleRef, ...]:
        began = time.perf_counter()
        found = capture(task)
        seconds.append(time.perf_counter() - began)
        return found

    run.producer.refs = refs  # type: ignore[method-assign]
    return seconds


def measure(
    run: Run, trainer: Trainer, captures: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each of our steps, of each bare one, and of ours what is not the trainer's."""
    held = dict[str, Sample]()
    ours, bare, control = list[float](), list[float](), list[float]()
    total = run.plan.total_steps
    for at in range(total):
        captures.clear()
        planned = run.plan.step(at)
        kept = {n: held[s.feature_id] for n, s in enumerate(planned.samples) if planned.epoch}
        if kept and at % 2:  # who comes second finds more of the samples in the cache
            bare.append(seconds(lambda p=planned, k=kept: trainer.train_step(p, k, total)))
        began = time.perf_counter()
        with run.feed.samples(planned) as fetched:
            assert fetched is not None
            opened = time.perf_counter()
            trainer.train_step(fetched.step, fetched.samples, total)
            stepped = time.perf_counter()
            held |= {s.id.feature_id: copied(s) for s in fetched.samples.values() if not kept}
            copied_at = time.perf_counter()
        run.feed.release(planned)
        around = opened - began - sum(captures) + time.perf_counter() - copied_at
        if kept:
            control.append(around)
            ours.append(around + stepped - opened)
        if kept and not at % 2:
            bare.append(seconds(lambda p=planned, k=kept: trainer.train_step(p, k, total)))
    return ours, bare, control


def copied(sample: Sample) -> Sample:
    return dataclasses.replace(
        sample,
        token_ids_T=sample.token_ids_T.clone(),
        loss_mask_T=sample.loss_mask_T.clone(),
        features={name: feature.clone() for name, feature in sample.features.items()},
    )


def settings(folder: Path, epochs: int) -> RunConfig:
    answers = [chr(97 + row) * TOKENS for row in range(SAMPLES)]
    options = {"layers": [1, 2, 4], "draft_vocab_size": 240}
    return RunConfig.model_validate(
        {
            "run": str(folder / "run"),
            "target": {"path": str(tiny_target(folder / "target")), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", answers))},
            "algorithm": {"name": "eagle3", "options": options},
            "capture": {"batch": BATCH},
            "train": {"batch": BATCH, "epochs": epochs, "device": "cpu"},
        }
    )
