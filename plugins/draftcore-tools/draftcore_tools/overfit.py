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

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from draftcore_data.conversations import BadRow
from draftcore_data.rendering import Renderer
from draftcore_data.sources import named, read_conversations
from draftcore_eval.decode import EagerRunner, resolve_ties, speculate
from draftcore_eval.proposals import depth_of
from draftcore_hf.target import TransformersTarget
from numpy.typing import NDArray

from draftcore.config import EvalConfig, RunConfig, TopologyConfig
from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.contracts.capture import Image
from draftcore.contracts.target import TargetSpec
from draftcore.drafts import export, find_checkpoint, load_checkpoint, load_export
from draftcore.errors import DraftcoreError, UsageError
from draftcore.plugins.binding import find_source
from draftcore.plugins.registry import Registry
from draftcore.run import DraftRun, Run
from draftcore.run.capture import capture_all
from draftcore.run.train import train
from draftcore_tools.reference import open_reference
from draftcore_tools.verify import servers_of, verify_export

FIRST = 64  # steps before the draft is decoded with; then twice as many each time
ANSWER = 49  # tokens: three rounds of blocks of 16, and the first token
# Learning rate times hidden size: the rate at which random weights still train falls with the width.
RATE = 0.5


class Interrupted(Exception):  # noqa: N818  Ctrl-C, which is no failure
    """The user asked to stop."""


@dataclass(frozen=True)
class Limits:
    """When to give up, and the learning rate; None is RATE over the hidden size."""

    steps: int
    minutes: float
    lr: float | None


@dataclass(frozen=True)
class OneSample:
    """The only sample of the run, in the place of a dataset."""

    prompt: list[int]
    answer: list[int]
    chat_template: str

    @cached_property
    def _tokens(self) -> NDArray[np.int64]:
        return np.array(self.prompt + self.answer, dtype=np.int64)

    def tokens(self, row: int) -> NDArray[np.int64]:
        return self._tokens

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.arange(len(self._tokens)) >= len(self.prompt) - 1

    def images(self, row: int) -> tuple[Image, ...]:
        return ()

    @property
    def feature_ids(self) -> tuple[str, ...]:
        return (hashlib.blake2b(self._tokens.tobytes(), digest_size=12).hexdigest(),)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(self._tokens)], dtype=np.int64)

    @property
    def summary(self) -> DataSummary:
        learned = self._tokens[self.loss_mask(0)]
        ids, counts = np.unique(learned, return_counts=True)
        length = len(self._tokens)
        return DataSummary(
            self.feature_ids[0], 1, length, len(learned), length,
            dict(zip(ids.tolist(), counts.tolist(), strict=True)), self.chat_template,
        )  # fmt: skip


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


def overfit_and_verify(
    settings: RunConfig, registry: Registry, row: int, limits: Limits,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Overfit one draft's configuration, and compare its export with what servers would compute.

    Raises DraftcoreError where it stops before every draft is accepted, naming the stage and the
    usual causes, and where a server would compute another draft.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        written = overfit(settings, registry, row, limits, Path(folder), say)
        if written is None:
            say("the algorithm has no export layout: the checkpoint was decoded with")
        else:
            verify_served(settings, registry, written, say)
    say(f"every draft is accepted ({time.perf_counter() - began:.0f} s)")


def overfit(
    settings: RunConfig, registry: Registry, row: int, limits: Limits, folder: Path,
    say: Callable[[str], None],
) -> Path | None:  # fmt: skip
    """Train and decode, twice as many steps each time, until every draft is accepted.

    Returns the export of that draft; None where the algorithm has no layout.
    """
    target = settings.target
    spec = TransformersTarget(**target.model_dump())
    rate = limits.lr or RATE / int(spec.text_config.hidden_size)
    settings = settings_for_one(settings, folder, rate)
    with stage("rendering"):
        sample = make_sample(settings, registry, spec, row)
    say(f"prompt of {len(sample.prompt)} tokens, the target's own answer has {len(sample.answer)}")
    with stage("capture"):
        capture_all(open_run(settings, registry, spec, FIRST), sample)
    measured, began, steps = list[Measurement](), time.perf_counter(), FIRST
    while True:
        steps = min(steps, limits.steps)
        run = open_run(settings, registry, spec, steps)
        draft = run.drafts[0]
        with stage("training"):
            if train(run, say=lambda line: None, samples=sample) == "interrupted":
                raise Interrupted
        written = write_export(draft, settings.run / f"export-{steps}")
        with stage("decoding"):
            built = load_export(draft, written) if written else newest_draft(draft)
            found = decode(draft, built, sample)
        measured.append(Measurement(steps, last_loss(run.folder), *found))
        say(str(measured[-1]))
        if measured[-1].perfect:
            return written
        minutes = (time.perf_counter() - began) / 60
        if steps >= limits.steps or 2 * minutes > limits.minutes:
            trained, *_ = decode(draft, newest_draft(draft), sample)
            raise DraftcoreError(diagnosis(measured, trained, draft))
        steps *= 2


def make_sample(settings: RunConfig, registry: Registry, target: TargetSpec, row: int) -> OneSample:
    """Return the prompt of a row of the training data with the target's own answer."""
    source = settings.data.train or settings.data.eval
    if source is None:
        raise UsageError("data.train is not set\n  set it to conversations in JSONL")
    rows = list(read_conversations(source, row + 1, partial(find_source, registry)))
    if len(rows) <= row:
        raise UsageError(
            f"{named(source)} has {len(rows)} rows, and row {row} was asked for (from 0)"
        )
    if isinstance(chosen := rows[row], BadRow):
        raise UsageError(f"{chosen}\n  choose another row with --row")
    renderer = Renderer(target.load_tokenizer(), settings.data)
    prompt = renderer.prompt_ids(chosen)
    (answer,) = target.load_model().generate([prompt], ANSWER)
    if len(answer) < 3:
        raise UsageError(
            f"the target answers row {row} with {len(answer)} tokens: too few to draft\n"
            "  choose another row with --row"
        )
    return OneSample(prompt, answer, renderer.template_hash)


def settings_for_one(settings: RunConfig, folder: Path, rate: float) -> RunConfig:
    """Return the settings of a run on one conversation, in a folder of its own."""
    tuning = {"batch": 1, "accumulate": 1, "lr": rate, "schedule": "cosine", "eval_every": None}
    return settings.model_copy(
        update={
            "run": folder / "run",
            "store": f"file:{folder / 'features'}",
            "topology": TopologyConfig(),
            "train": settings.train.model_copy(update={**tuning, "keep_checkpoints": 1}),
        }
    )


def open_run(
    settings: RunConfig, registry: Registry, target: TransformersTarget, steps: int
) -> Run:
    """Open the run up to a number of steps; it resumes what is in its folder."""
    length = {"epochs": steps, "max_steps": steps, "checkpoint_every": steps, "log_every": steps}
    train = settings.train.model_copy(update=length)
    return Run(settings.model_copy(update={"train": train}), registry, target=target)


def last_loss(folder: Path) -> float:
    """Return the loss that a run logged last."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [float(line["loss"]) for line in lines if "loss" in line][-1]


def write_export(draft: DraftRun, folder: Path) -> Path | None:
    """Export the newest checkpoint in the algorithm's first layout, if it has one."""
    layouts = [name for name in draft.algorithm.capabilities if name.startswith("layout:")]
    if not layouts:
        return None
    with stage("export"):
        found = find_checkpoint(draft, None)
        return export(draft, found, folder, min(layouts).removeprefix("layout:"))


def newest_draft(draft: DraftRun) -> Draft:
    """Load the draft of the newest checkpoint."""
    return load_checkpoint(draft, find_checkpoint(draft, None))


def decode(
    draft: DraftRun, built: Draft, sample: OneSample
) -> tuple[float, float, tuple[float, ...]]:
    """Decode the answer; returns acceptance length, the best that is possible, and by position.

    As many whole rounds are asked for as the answer has. Raises DraftcoreError where the output is
    not the target's own.
    """
    model = draft.run.target.load_model()
    built.module.to(model.device).eval()
    drafter = draft.drafter(built)
    block = depth_of(drafter) + 1
    whole = (len(sample.answer) - 1) // block * block
    wanted = 1 + (whole or len(sample.answer) - 1)
    config = EvalConfig(max_new_tokens=wanted)
    runner = EagerRunner(model, drafter)
    (decoded,) = speculate(runner, [sample.prompt], config)
    resolve_ties(runner, decoded, sample.answer[:wanted], config)
    tokens = len(decoded.tokens) - 1
    rounds = -(-tokens // block)  # as many as there are if no draft is wrong
    by_position = tuple(
        sum(count > k for count in decoded.accepted) / max(1, sum(r > k for r in decoded.room))
        for k in range(block - 1)
    )
    return tokens / len(decoded.accepted), tokens / rounds, by_position


def diagnosis(measured: list[Measurement], trained: float, draft: DraftRun) -> str:
    """Say at which stage the draft stopped learning, with the figures and the usual causes.

    `trained` is the acceptance length of the checkpoint itself, not read back from its export.
    """
    first, last, best = measured[0], measured[-1], max(one.acceptance for one in measured)
    head = (
        f"{draft.choice.name} did not learn one conversation in {last.step} steps\n"
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
    settings: RunConfig, registry: Registry, written: Path, say: Callable[[str], None]
) -> None:
    """Verify the export for the servers that its algorithm knows, if any; raises DraftcoreError."""
    target = settings.target
    reference = open_reference(registry, written, None, target.path, target.device, None)
    if not any(name.startswith("served:") for name in reference.run.algorithm.capabilities):
        return
    for server in servers_of(reference, "all"):
        verdict = verify_export(reference, written, server)
        if verdict.divergence is not None:
            raise DraftcoreError("stopped at: serving\n" + "\n".join(verdict.lines()))
        say("\n".join(verdict.lines()))


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Say in an error at which stage it came up."""
    try:
        yield
    except DraftcoreError as error:
        raise DraftcoreError(f"stopped at: {name}\n{error}") from error
