"""What an algorithm is given and what it returns: samples, batches, losses, drafts, drafters.

Shape letters: B rows, T tokens, H width, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.contracts.capture import FeatureRequest
    from draftcore.contracts.target import TargetSpec


class SampleId(NamedTuple):
    """One training use of captured features; `epoch` counts from 1."""

    feature_id: str
    epoch: int


@dataclass(frozen=True)
class DataSummary:
    """What a draft may know of its training data; stored in checkpoints.

    `token_counts` counts loss-masked tokens by target token id; `chat_template` is the hash of the
    one that wrote the samples, `date` what it was told for today, if it asked.
    """

    fingerprint: str
    samples: int
    tokens: int
    loss_tokens: int
    max_length: int
    token_counts: Mapping[int, int] = field(repr=False)
    chat_template: str = ""
    date: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, where token counts are pairs: their keys are numbers."""
        return {**vars(self), "token_counts": list(self.token_counts.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataSummary:
        return cls(**{**data, "token_counts": dict(data["token_counts"])})


class OnDevice:
    """A record of tensors, and mappings of them, that move together."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on a device, which is not waited for."""

        cuda = str(device).startswith("cuda")

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: moved(tensor) for name, tensor in value.items()}
            if cuda and getattr(value, "is_cpu", False):
                value = value.pin_memory()
            return value.to(device, non_blocking=True) if hasattr(value, "to") else value

        return type(self)(*(moved(value) for value in vars(self).values()))


@dataclass(frozen=True)
class Sample(OnDevice):
    """One sample with its features: token_ids_T int64, loss_mask_T bool, features [T, H] each."""

    id: SampleId
    token_ids_T: Tensor
    loss_mask_T: Tensor
    features: Mapping[str, Tensor]


@dataclass(frozen=True)
class DraftBatch(OnDevice):
    """A collated batch: right-padded rows; masks are true where a token counts.

    `host_mask_BT` is the loss mask on the CPU, where the trainer keeps it: what is found by its values
    there, sizes above all, waits for no device.
    """

    ids: tuple[SampleId, ...]
    token_ids_BT: Tensor
    loss_mask_BT: Tensor
    attention_mask_BT: Tensor
    features: Mapping[str, Tensor]
    host_mask_BT: Tensor | None = None


@dataclass(frozen=True)
class StepContext:
    """Where a step stands in its run; schedules need `total_steps`, random choices `seed`.

    `step` and `epoch` count from 1, as everywhere. `training` is false where the loss of held-out
    samples is measured; step and epoch are then those of the last step that was taken.
    """

    step: int
    total_steps: int
    seed: int
    training: bool = True
    epoch: int = 1


@dataclass(init=False)
class StepOutput:
    """A loss as ratios of sums, so that any split of samples over micro-batches gives one update.

    Made of one ratio, `StepOutput(numerator, denominator, counts)`, or of several,
    `StepOutput(terms=[(numerator, denominator, weight), ...], counts=...)`: then the loss is the sum
    of weight * numerator / denominator. Numerators, which carry the gradient, and denominators, which
    do not, add up over micro-batches and ranks before the division; so do the two numbers of each
    metric in `counts`. A term whose denominators add up to 0 adds nothing. Metrics NAME_0, NAME_1, ... are
    one by position: progress shows the mean of `loss_*`, and each of `accuracy_*` and `acceptance_*`.
    """

    terms: Sequence[tuple[Tensor, Tensor, float]]
    counts: Mapping[str, tuple[Tensor, Tensor]]

    def __init__(
        self, numerator: Tensor | None = None, denominator: Tensor | None = None,
        counts: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        *, terms: Iterable[tuple[Tensor, Tensor, float]] = (),
    ) -> None:  # fmt: skip
        self.terms, self.counts = tuple(terms), {} if counts is None else counts
        if numerator is not None and denominator is not None and not self.terms:
            self.terms = ((numerator, denominator, 1.0),)
        elif numerator is not None or denominator is not None or not self.terms:
            several = "StepOutput(terms=[(numerator, denominator, weight), ...], counts=counts)"
            raise TypeError(f"a loss is StepOutput(numerator, denominator, counts) or {several}")

    @property
    def numerator(self) -> Tensor:
        """Of a loss that is one ratio."""
        return self._ratio[0]

    @property
    def denominator(self) -> Tensor:
        """Of a loss that is one ratio."""
        return self._ratio[1]

    @property
    def _ratio(self) -> tuple[Tensor, Tensor, float]:
        if len(self.terms) > 1:
            raise AttributeError(f"this loss has {len(self.terms)} terms: read output.terms")
        return self.terms[0]


@dataclass(frozen=True)
class Stop:
    """What an observer returns to end training after this step, and why. The core names `plugin`."""

    reason: str
    plugin: str = ""


@dataclass(frozen=True)
class TrainingDefaults:
    """The optimizer settings an algorithm's authors recommend, used where the run sets none."""

    lr: float
    warmup_ratio: float
    clip: float


@dataclass
class Draft:
    """A draft in training. `module.forward` computes the loss, so that sharding hooks see it.

    `config` is JSON data from which the algorithm rebuilds the same draft; `frozen` names the
    tensors that come from the target and are left out of checkpoints; `wrap_units` names the
    submodules that FSDP wraps, innermost first. Ranks wait for each other in every one of them: a
    loss calls the same units, and carries a gradient to the same weights, whatever the batch.
    A parameter group may have an `lr`, which is its peak, and a `weight_decay` of its own. `about` says
    in a line what was built, sizes above all; `train` prints it.
    """

    module: torch.nn.Module
    config: Mapping[str, Any]
    defaults: TrainingDefaults
    parameter_groups: Sequence[Mapping[str, Any]]
    frozen: frozenset[str] = frozenset()
    wrap_units: tuple[str, ...] = ()
    about: str = ""


class Algorithm(ABC):
    """An algorithm as one object, which an offer names by its `implementation`.

    A run makes it with its validated options. Each method answers the hook of its name, and takes
    of the hook's arguments those that it needs; `options` are `self.options`. Beside the four here,
    which training needs, any hook of an algorithm may be a method: `optimizer`, `schedule`,
    `eval_metrics`, `drafter`, `export_draft`, `import_draft`, `read_export`, `disagg_row`,
    `build_disagg_draft_input`.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        """Say which target features training needs. Called before the target's weights are read."""

    @abstractmethod
    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        """Build the draft in fp32 on the CPU, initialised; the same seed gives the same bits."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        """Make a batch; tokens and masks lie on the CPU, features on the device that trains."""

    @abstractmethod
    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        """Run the draft and return its loss, for the trainer to divide; masked out it is 0."""


@dataclass(frozen=True)
class Proposal:
    """The drafts of a round, which the target reads at once: K nodes a row, integers in int64.

    Each node follows the one before it, a chain, or with `parents_BK` a tree: the node of that index,
    which comes before it, or for -1 the last known token. The first counts_B of a row count, all
    without it; the others are read and never accepted.

    Sampling needs `probs_BKV`: what a node's token was drawn from, given that the siblings before it
    were refused. That is the draft's distribution where they are drawn independently, what is left
    of it without replacement, 1 at the token where it was chosen. Whether a node is there and counts
    may depend on tokens drawn before it, not on its own.
    """

    tokens_BK: Tensor
    probs_BKV: Tensor | None = None
    parents_BK: Tensor | None = None
    counts_B: Tensor | None = None


class Drafter(Protocol):
    """A reference decoder over a fixed batch with preallocated KV; no host sync in `propose`.

    Positions: `prefill` takes the prompt's tokens, their target features and the first generated
    token; `accept` takes what the target verified in a round, left-aligned. A state is tensors, batch
    first, in dataclasses, dicts, lists or tuples; weights are read at every call (see `graphs`).

    A drafter that proposes trees has one attribute more, `depth`: the most nodes on a path.

    Shape letters: B rows, T tokens, K drafted tokens (`num_drafts`), V vocabulary, D = K in a chain and
    `depth` in a tree.
    """

    num_drafts: int
    request: FeatureRequest

    def allocate(self, batch: int, max_len: int) -> Any:
        """Return a state with KV for `batch` rows of up to `max_len` positions, drafts included."""

    def prefill(
        self, state: Any, tokens_BT: Tensor, lengths_B: Tensor, features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:  # fmt: skip
        """Read right-padded prompts of `lengths_B` tokens, with their features, [B, T, H] each.

        `next_B` is the token that the target generated first; the next proposal goes on from it.
        """

    def propose(
        self, state: Any, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Return the drafts of a round; with a temperature they are drawn, and have `probs_BKV`."""

    def accept(
        self, state: Any, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Take over a verified round.

        `tokens_BK` holds D+1 tokens a row, of which the first counts_B (accepted drafts, then the
        target's own token) are new; `features` are the target's for the D+1 tokens before them
        (the last token of the round before, then the drafts), of which counts_B are valid.
        """

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """Return a state that keeps only these rows, in this order."""
