"""Train a draft on one conversation until every draft is accepted: `draftcore overfit`.

A draft that cannot learn one answer by heart will not learn a corpus, and one that knows it by heart
but is not accepted was trained on other positions, masks or layers than it decodes with. Both show
here in minutes, and otherwise after days. All stages of a run are gone through: capture into a store,
train, save, export, read the export again, decode with it.

The text to learn is the target's own greedy answer, since that is what decoding will ask for. Its
token ids are kept as they are: written out and rendered again they could be others. One token before
the answer counts as well: EAGLE-3's published mask supervises the first round of drafts there.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from click.exceptions import Exit
from draftcore_eval.decode import EagerRunner, resolve_ties, speculate
from draftcore_eval.options import EvalOptions
from draftcore_eval.proposals import depth_of

from draftcore import capture, export, open_draft, open_run, train
from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import OpenDraft, OpenRun
from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore_tools.reference import open_reference, serving_layout
from draftcore_tools.verify import Verdict, servers_of, verify_export

FIRST = 64  # steps before the draft is decoded with; then twice as many each time
ANSWER = 49  # tokens: three rounds of blocks of 16, and the first token
# Learning rate times hidden size: the rate at which random weights still train falls with the width.
RATE = 0.5


@dataclass(frozen=True)
class Limits:
    """When to give up, and the learning rate; None is RATE over the hidden size."""

    steps: int
    minutes: float
    lr: float | None


@dataclass(frozen=True)
class OneRun:
    """A run on one conversation: its YAML file, and the tokens that it learns."""

    file: Path
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Measurement:
    """What decoding with the draft of one step measured; `most` is the best that is possible."""

    step: int
    loss: float
    acceptance: float
    most: float
    by_position: tuple[float, ...]

    @property
    def perfect(self) -> bool:
        return self.acceptance >= self.most

    def __str__(self) -> str:
        return (
            f"step {self.step:5}: loss {self.loss:.4f}, acceptance length {self.acceptance:.2f} "
            f"of {self.most:.2f}"
        )


@dataclass(frozen=True)
class Learned:
    """What a draft came to on one conversation: each look at it, and what servers would compute."""

    measured: tuple[Measurement, ...]
    verdicts: tuple[Verdict, ...]


def overfit_and_verify(
    settings: Any, registry: Any, row: int, limits: Limits, say: Callable[[str], object]
) -> Learned:
    """Overfit one draft's configuration, and compare its export with what servers would compute.

    Raises DraftcoreError where it stops before every draft is accepted, naming the stage and the
    usual causes, and where a server would compute another draft.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        written, measured = overfit(settings, registry, row, limits, Path(folder), say)
        verdicts = list[Verdict]()
        if written is None:
            say("the algorithm has no export layout: the checkpoint was decoded with")
        else:
            verdicts = verify_served(settings, registry, written, say)
    say(f"every draft is accepted ({time.perf_counter() - began:.0f} s)")
    return Learned(tuple(measured), tuple(verdicts))


def overfit(
    settings: Any, registry: Any, row: int, limits: Limits, folder: Path,
    say: Callable[[str], object],
) -> tuple[Path | None, list[Measurement]]:  # fmt: skip
    """Train and decode, twice as many steps each time, until every draft is accepted.

    Returns the export of that draft, None where the algorithm has no layout, and what was measured.
    """
    quietly = {"registry": registry, "say": lambda line: None}
    with stage("rendering"):
        one = prepare(settings, registry, row, limits.lr, folder)
    gc.collect()  # of this target, before the next is read
    say(f"prompt of {len(one.prompt)} tokens, the target's own answer has {len(one.answer)}")
    with stage("capture"):
        capture(one.file, **quietly)
    gc.collect()
    with open_run(one.file, (), registry) as run:
        draft, measured = run.drafts[0], list[Measurement]()
        began, steps = time.perf_counter(), FIRST
        layout = serving_layout(draft)
        while True:
            steps = min(steps, limits.steps)
            keys = ("epochs", "max_steps", "checkpoint_every", "log_every")
            with stage("training"):
                trained = train(one.file, *(f"train.{key}={steps}" for key in keys), **quietly)
                if trained.reason == "interrupted":
                    raise Exit(ExitStatus.INTERRUPTED)
            written = None
            if layout:
                written = folder / f"run/export-{steps}"
                with stage("export"):
                    export(one.file, out=written, layout=layout, **quietly)
            with stage("decoding"):
                figures = decode(draft, open_draft(draft, None, written)[0], one)
            measured.append(Measurement(steps, last_loss(run.folder), *figures))
            say(str(measured[-1]))
            if measured[-1].perfect:
                return written, measured
            minutes = (time.perf_counter() - began) / 60
            if steps >= limits.steps or 2 * minutes > limits.minutes:
                unexported, *_ = decode(draft, open_draft(draft, None, None)[0], one)
                raise DraftcoreError(diagnosis(measured, unexported, draft))
            steps *= 2


def prepare(settings: Any, registry: Any, row: int, lr: float | None, folder: Path) -> OneRun:
    """Write the run on one conversation, all of it in a folder of its own."""
    given = settings.model_dump(mode="json")
    given |= {"run": str(folder / "run"), "store": f"file:{folder / 'features'}", "topology": {}}
    tuning = {"batch": 1, "accumulate": 1, "schedule": "cosine", "eval_every": 0}
    given["train"] |= {**tuning, "keep_checkpoints": 1}
    (file := folder / "run.yaml").write_text(json.dumps(given))
    with open_run(file, (), registry) as run:
        prompt, answer = ask(run, row)
        given["train"]["lr"] = lr or RATE / run.width
    given["data"] = {"name": "one-row", "prompt": prompt, "answer": answer}
    file.write_text(json.dumps(given))
    return OneRun(file, prompt, answer)


def ask(run: OpenRun, row: int) -> tuple[list[int], list[int]]:
    """Return the prompt of a row of the training data with the target's own answer."""
    part: Literal["train", "eval"] = "train" if run.data.train else "eval"
    name = run.data.train or run.data.eval
    if name is None:
        raise UsageError("data.train is not set\n  set it to conversations in JSONL")
    samples = run.data.samples(part, limit=row + 1)
    if (rows := len(samples.feature_ids)) <= row:
        raise UsageError(f"{name} has {rows} rows, and row {row} was asked for (from 0)")
    another = "choose another row with --row"
    if samples.images(row):
        raise UsageError(f"row {row} asks about images, and text alone is asked\n  {another}")
    mask = samples.loss_mask(row)
    *_, last = np.flatnonzero(np.diff(mask, prepend=False) & mask)  # where each answer begins
    prompt: list[int] = samples.tokens(row)[:last].tolist()
    (answer,) = run.target.load_model().generate([prompt], ANSWER)
    if len(answer) < 3:
        raise UsageError(
            f"the target answers row {row} with {len(answer)} tokens: too few to draft\n  {another}"
        )
    return prompt, answer


def last_loss(folder: Path) -> float:
    """Return the loss that a run logged last."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [float(line["loss"]) for line in lines if "loss" in line][-1]


def decode(draft: OpenDraft, built: Draft, one: OneRun) -> tuple[float, float, tuple[float, ...]]:
    """Decode the answer; returns acceptance length, the best that is possible, and by position.

    As many whole rounds are asked for as the answer has. Raises DraftcoreError where the output is
    not the target's own.
    """
    model = draft.run.target.load_model()
    built.module.to(model.device).eval()
    drafter = draft.drafter(built)
    block = depth_of(drafter) + 1
    whole = (len(one.answer) - 1) // block * block
    wanted = 1 + (whole or len(one.answer) - 1)
    options = EvalOptions(max_new_tokens=wanted)
    runner = EagerRunner(model, drafter)
    (decoded,) = speculate(runner, [one.prompt], options)
    resolve_ties(runner, decoded, one.answer[:wanted], options)
    tokens = len(decoded.tokens) - 1
    rounds = -(-tokens // block)  # as many as there are if no draft is wrong
    by_position = tuple(
        sum(count > k for count in decoded.accepted) / max(1, sum(r > k for r in decoded.room))
        for k in range(block - 1)
    )
    return tokens / len(decoded.accepted), tokens / rounds, by_position


def diagnosis(measured: list[Measurement], trained: float, draft: OpenDraft) -> str:
    """Say at which stage the draft stopped learning, with the figures and the usual causes.

    `trained` is the acceptance length of the checkpoint itself, not read back from its export.
    """
    first, last, best = measured[0], measured[-1], max(one.acceptance for one in measured)
    head = (
        f"{draft.algorithm.offer.name} did not learn one conversation in {last.step} steps\n"
        f"  acceptance length {best:.2f} at best, {last.most:.2f} is possible; loss "
        f"{first.loss:.4f} at step {first.step}, {last.loss:.4f} now\n"
        f"  accepted by position: {'  '.join(f'{rate:.2f}' for rate in last.by_position)}\n"
    )
    if trained > last.acceptance:
        return head + (
            f"  stopped at: export. The checkpoint itself decodes with {trained:.2f}, read back "
            f"from its export with {last.acceptance:.2f}\n"
            "  usual causes: a tensor or an option that export drops, or import reads otherwise"
        )
    if last.acceptance < 0.5 * (1 + last.most) and last.loss < 0.5 * first.loss:
        return head + (
            "  stopped at: decoding. The loss falls and acceptance does not follow\n"
            "  usual causes: decoding differs from training in positions, attention mask, captured "
            "layers,\n  the token that goes with a feature, or the number of drafts"
        )
    return head + (
        "  stopped at: training\n"
        "  usual causes: a learning rate that is too low or too high (--lr), labels shifted "
        "against\n  features, a loss mask that leaves the answer out, or a part that gets no "
        "gradient; if the loss\n  still falls, give it more --steps and --minutes"
    )


def verify_served(
    settings: Any, registry: Any, written: Path, say: Callable[[str], object]
) -> list[Verdict]:
    """Verify the export for the servers that its algorithm knows, if any; raises DraftcoreError."""
    verdicts = list[Verdict]()
    target = settings.target.options
    with open_reference(registry, written, None, target["path"], target["device"]) as reference:
        if not any(name.startswith("served:") for name in reference.run.algorithm.capabilities):
            return verdicts
        for server in servers_of(reference, "all"):
            verdict = verify_export(reference, written, server)
            if verdict.divergence is not None:
                raise DraftcoreError("stopped at: serving\n" + "\n".join(verdict.lines()))
            say("\n".join(verdict.lines()))
            verdicts.append(verdict)
    return verdicts


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Say in an error at which stage it came up."""
    try:
        yield
    except DraftcoreError as error:
        raise DraftcoreError(f"stopped at: {name}\n{error}") from error
