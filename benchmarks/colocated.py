"""Steps of a colocated run beside a bare loop over the same samples: what the loader costs.

Both loops take the trainer's own step on the same planned batches. The bare one has their samples in a
dictionary; the other gets them through loader and capture, as `draftcore train` does. They take turns
from the second epoch on. The target's forward is work and no control: its time is left out.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from draftcore_sdk.targets import conversations, tiny_target
from report import ms, report, seconds

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import Sample
from draftcore.contracts.capture import Capture, CaptureBatch, CapturedBatch
from draftcore.contracts.run import Loaded
from draftcore.features.loader import Captured, Loader
from draftcore.plugins.registry import load_plugins
from draftcore.run import Run
from draftcore.run.train import trainer_parts
from draftcore.training.loop import Step, Trainer

BATCH, SAMPLES, TOKENS = 4, 16, 250


class Timed:
    """A capture that notes how long it takes."""

    def __init__(self, capture: Capture) -> None:
        self.capture, self.took = capture, 0.0

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        began = time.perf_counter()
        found = list(self.capture.features(batches))
        self.took = time.perf_counter() - began
        yield from found

    def close(self) -> None:
        self.capture.close()


def colocated(rounds: int) -> None:
    """The ratio of the two steps, and what a step spends outside of the trainer's."""
    with tempfile.TemporaryDirectory() as folder:
        ours, bare, control = measure(
            Run(settings(Path(folder), epochs=2 + rounds), load_plugins())
        )
    step, alone, around = ms(ours), ms(bare), 1e3 * ms(control)
    measured = f"{step / alone - 1:+.1%}: {step:.2f} ms beside {alone:.2f} ms"
    report("colocated: a step beside a bare loop's", measured, "within 1 %", step <= 1.01 * alone)
    share = around / 1e3 / alone
    measured = f"{around:.0f} us, {share:.2%} of a step: {BATCH} samples of some {TOKENS} tokens"
    report("colocated: loader of a step", measured, "<= 1 % of a step", share <= 0.01)


def measure(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each of our steps, of each bare one, and of ours what is not the trainer's."""
    parts = trainer_parts(run, "both")
    (trainer,) = parts.trainers
    capture = Timed(run.open_capture(parts.features.request))
    uses = parts.plan.uses(0)
    batches = Captured(uses, capture, parts.samples, parts.skipped)
    device, held = torch.device("cpu"), dict[int, list[Sample]]()
    loader = Loader(batches, ahead=0, device=device, stop=lambda: False)
    ours, bare, control = list[float](), list[float](), list[float]()
    for at in range(parts.plan.total_steps):
        (planned,) = parts.plan.step(at)
        kept = Loaded(planned, held.get(planned.index, []))
        if kept.samples and at % 2:  # who comes second finds more of the samples in the cache
            bare.append(seconds(lambda kept=kept: step(trainer, kept)))
        began = time.perf_counter()
        loaded = next(loader)
        opened = time.perf_counter()
        step(trainer, loaded)
        stepped = time.perf_counter()
        if kept.samples:
            control.append(opened - began - capture.took)
            ours.append(stepped - began - capture.took)
            if not at % 2:
                bare.append(seconds(lambda kept=kept: step(trainer, kept)))
        held.setdefault(planned.index, loaded.samples)
    loader.close()
    return ours, bare, control


def step(trainer: Trainer, batch: Loaded) -> None:
    trainer.accumulate(batch, last=True)
    trainer.update(len(trainer.gradients.buffers))
    trainer.previous_step = Step()


def settings(folder: Path, epochs: int) -> RunConfig:
    answers = [chr(97 + row) * TOKENS for row in range(SAMPLES)]
    options = {"layers": [1, 2, 4], "draft_vocab_size": 240}
    return RunConfig.model_validate(
        {
            "run": str(folder / "run"),
            "target": {"path": str(tiny_target(folder / "target")), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", answers))},
            "algorithm": {"name": "eagle3", "options": options},
            "train": {"batch": BATCH, "epochs": epochs, "device": "cpu"},
        }
    )
