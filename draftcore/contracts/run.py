"""A run as plugins see it: its target, drafts, rows, where its batches come from, what evaluates it.

The trainer opens a run and hands it out; plugins answer with the records here. Shape letters: T tokens
of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from draftcore.errors import DraftcoreError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from draftcore.contracts.algorithm import DataSummary, Draft, Drafter, Sample
    from draftcore.contracts.capture import CaptureBatch, FeatureRequest, Image, ImageProcessor
    from draftcore.contracts.offers import Bound
    from draftcore.contracts.runner import PhaseName, Runner
    from draftcore.contracts.store import FeatureStore, SampleRef
    from draftcore.contracts.target import TargetSpec

T = TypeVar("T")
LOCK = ".lock"  # in a run's folder: a file that rank 0 holds locked while it trains

# ---------------------------------------------------------------- rows


class Samples(Protocol):
    """Rows of a run: rendered, or described by the manifest of a store that holds their features."""

    @property
    def feature_ids(self) -> tuple[str, ...]:
        """What a store keeps each row's features under."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""

    @property
    def summary(self) -> DataSummary: ...

    def tokens(self, row: int) -> NDArray[np.int64]:
        """Return a row's token ids, [T]."""

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """Return where the loss counts, [T]."""

    def images(self, row: int) -> tuple[Image, ...]:
        """Return a row's images, in their order."""


@dataclass(frozen=True)
class Prompts:
    """Prompts to decode from, and for reports what they are: where they came from, what was left out."""

    token_ids: Sequence[Sequence[int]]
    about: Mapping[str, Any] = field(default_factory=dict)


class RunSamples(Protocol):
    """All rows of a run. `longest` bounds the tokens of a row; `train` and `eval` name where they lie.

    What is named nowhere is None, and so are the samples of it.
    """

    longest: int
    train: str | None
    eval: str | None
    images: ImageProcessor | None  # what reads the images of rows, or refuses them and says why

    def samples(self, part: Literal["train", "eval"], date: str = "", limit: int = 0) -> Samples:
        """Open the rows to train on, or held-out ones; at most `limit`, if it is not 0.

        `date` is what a template is told for today; '' for that of the rows that are there. Raises
        UsageError where they cannot be read, and for none.
        """

    def prompts(self, limit: int = 0) -> Prompts:
        """Read the held-out prompts. Raises UsageError where there are none."""


# ---------------------------------------------------------------- a run


class Ranks:
    """The ranks of a run, and this one's place; as it stands a single one, which needs nobody.

    An error that the ranks meet together (`on_rank0`, `raise_on_all`) is raised on all of them, and they
    may go on. One that strikes a rank alone ends the run on all.
    """

    rank, size = 0, 1
    device_group: Any = None  # torch's process group of the devices that train
    last_common_error: BaseException | None = None  # that all ranks raised

    def all_gather(self, value: T) -> list[T]:
        """Give every rank the values of all, by rank: small data."""
        return [value]

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise a DraftcoreError of any rank on all, where the block ends."""
        try:
            yield
        except DraftcoreError as error:
            self.last_common_error = error
            raise

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Let rank 0 do something and give its result, small data, to all."""
        with self.raise_on_all():
            return work()

    def broadcast(self, tensor: Tensor) -> None:
        """Give a tensor of rank 0, on the CPU, to all, in place."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a tensor on the device over all ranks, in place."""

    def shard(
        self, hook: Any, draft: Draft, options: Any, evaluated: bool,
        trained_tensors: Callable[[Draft, int], Mapping[str, Tensor]],
    ) -> Any:  # fmt: skip
        """Shard a draft over several ranks; return what computes its `loss`, and its `whole` for rank 0.

        `trained_tensors` puts shards together. Raises DraftcoreError for weights that cannot be sharded.
        """

    def device(self, name: str) -> torch.device:
        """Return this rank's device, of those that a name stands for."""
        from draftcore.tensors import resolve_device

        return resolve_device(name)

    def close(self) -> None:
        """Part when all ranks are here."""

    def leave(self, error: BaseException) -> None:
        """Part after an error, for the caller to raise; SystemExit where another rank failed before."""


class OpenDraft(Protocol):
    """One draft of a run; `label` is empty for a single one, and `prefix` begins a line about it.

    `folder` is its own, `config` the run's as if it were the only draft.
    """

    run: OpenRun
    label: str
    prefix: str
    folder: Path
    config: Any
    options: Any
    algorithm: Bound

    def drafter(self, draft: Draft) -> Drafter:
        """Return the reference decoder of the draft."""

    def more_metrics(self, draft: Draft, report: Mapping[str, Any]) -> dict[str, float]:
        """Return what the algorithm and the plugins of the run add to a report (`eval_metrics`)."""


class OpenCapture(Protocol):
    """A run's capture, whose every batch is checked."""

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[Any]:
        """Yield each CapturedBatch, as `Capture.features` does."""

    def begin(
        self, batch: CaptureBatch, loss_masks: Sequence[Sequence[bool]], store: FeatureStore,
        provenance: str,
    ) -> Callable[[], tuple[SampleRef, ...]]:  # fmt: skip
        """Capture a batch; what is returned puts it with its text, while the next one is captured.

        Both raise BadRows for rows at fault, such as features that are not finite.
        """

    def close(self) -> None: ...


class OpenRun(Protocol):
    """A run that is opened: its configuration (`draftcore.config.RunConfig`), and what it selects.

    Raises UsageError wherever the configuration names what is not here.
    """

    config: Any
    folder: Path
    ranks: Ranks
    target: TargetSpec
    width: int  # of the target's hidden states
    capture: Bound
    drafts: Sequence[OpenDraft]
    observers: Any  # the hooks of the run's observers

    @property
    def data(self) -> RunSamples:
        """The rows of the run, by the plugin that `data.name` selects."""

    def bind(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, plugin: str = ""
    ) -> Bound:
        """Bind an offer with the run's wrappers."""

    def offered(self, kind: str) -> Mapping[str, frozenset[str]]:
        """Return the capabilities of the usable offers of a kind, by name."""

    def chosen(self, label: str | None, **folders: Path | None) -> Sequence[OpenDraft]:
        """Return the draft of this label, or all; `folders` are options that can be of one alone."""

    def open_store(self, uri: str) -> tuple[Bound, FeatureStore]:
        """Open a store: a durable one on each rank, any other on rank 0, whose URI the others join."""

    def open_capture(self, request: FeatureRequest, samples: Samples | None = None) -> OpenCapture:
        """Open the run's capture, which checks itself."""

    def differences(self, request: FeatureRequest, theirs: str, whose: str) -> str:
        """Say where another provenance of these features differs from that here, a line each."""

    def evaluation(self) -> Evaluation:
        """Open what measures drafts, by the plugin that `eval.name` selects."""

    def open_runner(
        self, phase: PhaseName, choice: Any, *, rows: int, longest: int, temperature: float = 0.0
    ) -> Runner:
        """Open the runner of a phase that a section chooses; without one, ours."""

    def report_runners(self, say: Callable[[str], object]) -> None:
        """Tell what the runners of capture and evaluation have to say of what they ran."""

    def manifest(self, drafts: Iterable[Any], *shared: Bound) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class PlannedBatch:
    """One use of a batch. `position` counts uses over the whole run, `index` is the cut's.

    They and `step` count from 0, as indices do, `epoch` from 1, as for plugins. `place` is the batch's
    position in its step: rank `place % ranks` trains on it.
    """

    position: int
    step: int
    place: int
    epoch: int
    index: int
    rows: tuple[int, ...]


@dataclass
class Loaded:
    """A batch as it is trained on, without skipped rows. Its tensors are valid until `handles` close."""

    planned: PlannedBatch
    samples: list[Sample]
    handles: ExitStack = field(default_factory=ExitStack)


class Skipped(Protocol):
    """The rows that a run leaves out, by number with the reason: a mapping."""

    def add(self, reasons: Mapping[int, str]) -> None:
        """Skip rows. Raises DraftcoreError where they are more than may be, or none."""

    def __contains__(self, row: object) -> bool: ...


@dataclass(frozen=True)
class Needed:
    """What a run's batches are made of; the trainer has opened it.

    `keeps` says that the store keeps what is read from it; what it holds is freed otherwise. A token takes
    `token_bytes` in it, and `held_batches` are held over all ranks.

    `uses` yields what a rank of so many still trains on, in order. `largest` returns the tokens of so many
    largest batches together, `batch_of` a planned batch, all rows of it, with their loss masks. `open_refs`
    opens a batch's refs, and tells a function its position once its tensors are closed. `ref_error` says
    what is wrong with published refs: BadRows where rows are to blame.
    """

    request: FeatureRequest
    provenance: str
    store: FeatureStore | None
    keeps: bool
    feature_ids: Sequence[str]
    skipped: Skipped
    held_batches: int
    token_bytes: int
    uses: Callable[[int, int], Iterator[PlannedBatch]]
    largest: Callable[[int], int]
    batch_of: Callable[[PlannedBatch], tuple[CaptureBatch, tuple[Any, ...]]]
    open_refs: Callable[[PlannedBatch, Sequence[SampleRef], Callable[[int], None]], Loaded]
    ref_error: Callable[[CaptureBatch, Sequence[SampleRef]], Exception | None]


class BatchSource(Protocol):
    """How batches reach the ranks of a run where other processes capture."""

    def open_store(self, needed: Needed, run_id: str) -> tuple[Bound, FeatureStore]:
        """Open the store of `store: auto`; it is the same at every start of a run."""

    def open(self, needed: Needed) -> AbstractContextManager[Batches]:
        """Begin to have batches captured; entered on every rank together."""


class Batches(Protocol):
    """A rank's batches. Only rank 0's are told how the run goes on."""

    def __iter__(self) -> Iterator[Loaded | None]:
        """Yield batches in the plan's order, and None while one is waited for."""

    def finished(self, position: int) -> None:
        """Hear that all before this position are trained on by all ranks."""

    def status(self) -> str:
        """Return what a progress line says of capture."""

    def end(self, state: Literal["finished", "failed"]) -> None:
        """Hear how the run ended."""


class RunEnded(UsageError):  # noqa: N818  how the work of a process that captures normally ends
    """The run is over, as its trainer said, or was asked to stop: there is nothing left to capture.

    `state` is `finished`, `interrupted`, or `failed` for a run that may be resumed.
    """

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


# ---------------------------------------------------------------- evaluation


class Report(Protocol):
    """What an evaluation of one draft found."""

    def to_json(self) -> dict[str, Any]: ...

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values for people."""

    def write(self, folder: Path) -> None:
        """Write the report, with what shows it, into a folder."""


class Evaluation(Protocol):
    """Measures drafts: each one alone by the verb `eval`, and in training beside the held-out loss.

    One that decodes by a runner may have it as its `runner`, whose report is then shown. One that has
    `card(draft, folder, report=None)` is called with each export, and returns lines to show: it may write
    a README.md there, which is none of the files that the manifest has digests of.
    """

    def evaluate(self, draft: OpenDraft, built: Draft, origin: Mapping[str, Any]) -> Report:
        """Measure a draft, which is moved to the target's device. Raises UsageError without prompts.

        `origin` is what it comes from, for the report: its `step`, 0 where nobody knows; its `checkpoint`,
        or the folder of its `export`; the `chat_template` of its data, as in `DataSummary`.
        """

    def compare(self, reports: Mapping[str, Any], folder: Path) -> Iterable[str]:
        """Return lines that compare the reports of several drafts by label, and show them in a folder."""

    def in_training(self, draft: OpenDraft) -> Callable[[Draft], dict[str, float]]:
        """Return what measures a draft in training; raises UsageError for what cannot work, at once.

        Weights may be updated in place between two calls. The best step is that of the greatest
        `acceptance_length`, if there is one among the figures, else of the lowest held-out loss.
        """
