"""What crosses a seam between the core and its plugins.

Control-plane records (`FeatureRequest`, `CaptureGroup`, `SampleRef`, ...) are frozen
metadata and never hold a tensor; tensors travel inside `CapturedGroup`, `Handle`, `Sample` and
`DraftBatch` only. Layer ids are 0-based *outputs of layer k* everywhere.

Shape letters: B batch, T tokens, H width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# ---------------------------------------------------------------- features and capture


@dataclass(frozen=True)
class FeatureRequest:
    """The features an algorithm trains on, as data, so that requests can be joined.

    `layers` are 0-based layer outputs (captured as `hidden.<k>`, after the residual add);
    `last_hidden` is the state after the final norm; `dtype` is the stored torch dtype's name.
    """

    layers: tuple[int, ...]
    last_hidden: bool
    dtype: str

    @property
    def names(self) -> tuple[str, ...]:
        hidden = tuple(f"hidden.{layer}" for layer in self.layers)
        return hidden + (("last_hidden",) if self.last_hidden else ())

    def serves(self, other: FeatureRequest) -> bool:
        """Say whether what this request captures holds all that another asks for."""
        return self.dtype == other.dtype and set(other.names) <= set(self.names)

    def union(self, other: FeatureRequest) -> FeatureRequest:
        """Join two requests of one dtype, storing nothing twice."""
        if self.dtype != other.dtype:
            raise ValueError(f"cannot join features of {self.dtype} with features of {other.dtype}")
        layers = tuple(sorted({*self.layers, *other.layers}))
        return FeatureRequest(layers, self.last_hidden or other.last_hidden, self.dtype)


@dataclass(frozen=True)
class CaptureGroup:
    """Samples that go through the target together, always in this composition and padded length.

    Padding and batch size change the last bits of a forward pass, so a group depends on the
    dataset and `capture.batch` alone, and a recapture repeats the whole group.
    """

    index: int
    rows: tuple[int, ...]
    feature_ids: tuple[str, ...]
    padded_length: int


@dataclass(frozen=True)
class CaptureInput:
    """A group with its token ids, one sequence per member."""

    group: CaptureGroup
    token_ids: tuple[Sequence[int], ...]


@dataclass(frozen=True)
class CapturedGroup:
    """Features of a group: per member a mapping of feature name to a [T, H] tensor."""

    group: CaptureGroup
    features: tuple[Mapping[str, Tensor], ...]


class Capture(Protocol):
    """An open capture backend. A short row raises; it is never returned."""

    def features(self, groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        """Yield each group's features in the order asked, rows exactly as long as their tokens.

        The device need not be waited for: who stores them does, and asks whether they are finite.
        """
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- stores


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SampleRef:
    """Where one sample's features lie. `generation` is unique per put, even across restarts."""

    feature_id: str
    generation: str
    uri: str
    tensors: tuple[TensorSpec, ...]
    tokens: int
    nbytes: int
    provenance: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tensors": [{**vars(spec)} for spec in self.tensors]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SampleRef:
        specs = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in data["tensors"])
        return cls(**{**data, "tensors": specs})


class Handle(Protocol):
    """An open read. The tensors stay valid until `close`; it is a context manager."""

    ref: SampleRef
    tensors: Mapping[str, Tensor]

    def close(self) -> None: ...
    def __enter__(self) -> Handle: ...
    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True)
class StoreItem:
    """One sample to put: its id, its tensors (any of them may be non-contiguous), its origin."""

    feature_id: str
    tensors: Mapping[str, Tensor]
    tokens: int
    provenance: str = ""


@dataclass(frozen=True)
class StoreStats:
    samples: int
    nbytes: int
    limit_bytes: int | None
    open_handles: int
    free_bytes: int | None = None  # on the medium below, where that is known


class FeatureStore(Protocol):
    """Keeps samples' features. `draftcore.testing` holds the suite that every store passes.

    `uri` is what another process opens to reach the same samples, where several can.
    """

    uri: str

    def put(self, item: StoreItem) -> SampleRef: ...
    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Store samples, all or none; a re-put supersedes. Raises `StoreFull`, or `StoreAway` for now."""
        ...

    def get(
        self, ref: SampleRef, device: str = "cpu", names: Sequence[str] | None = None
    ) -> Handle:
        """Open a sample for reading. A stale, freed, short or torn one raises `StoreError`."""
        ...

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]: ...
    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        """Return the current ref of each id that is held; ids not held are left out."""
        ...

    def free(self, refs: Iterable[SampleRef]) -> None:
        """Drop samples: idempotent, deferred while handles are open, never a newer generation."""
        ...

    def abort(self, feature_id: str) -> None: ...
    def stats(self) -> StoreStats: ...
    def close(self) -> None: ...


@runtime_checkable
class StoringCapture(Capture, Protocol):
    """A capture elsewhere that may put into a store from there, as `put_many` does."""

    def reaches(self, store: FeatureStore) -> bool: ...
    def deliver(
        self, group: CaptureInput, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]: ...


class DurableStore(FeatureStore, Protocol):
    """A store of capability `durable`: it outlives the process and says what it holds."""

    def read_manifest(self) -> dict[str, Any] | None: ...
    def write_manifest(self, data: Mapping[str, Any]) -> None: ...


# ---------------------------------------------------------------- the control plane


@dataclass(frozen=True)
class SampleId:
    """One training use of captured features."""

    feature_id: str
    epoch: int


@dataclass(frozen=True)
class PlannedStep:
    """The samples of one optimizer step, in order; a pure function of dataset, seed and index."""

    index: int
    epoch: int
    samples: tuple[SampleId, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class CaptureTask:
    """A group to capture, for the samples' uses in `epoch` (and later ones, if refs are kept).

    `claim` names one handing-out of it, so that a late publication is told from a current one.
    """

    epoch: int
    group: CaptureGroup
    claim: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureTask:
        group = data["group"]
        lists = {"rows": tuple(group["rows"]), "feature_ids": tuple(group["feature_ids"])}
        return cls(data["epoch"], CaptureGroup(**(group | lists)), data["claim"])


# ---------------------------------------------------------------- data and drafts


@dataclass(frozen=True)
class DataSummary:
    """What a draft may know of its training data; stored in checkpoints.

    `token_counts` counts loss-masked tokens by target token id; `chat_template` is the hash of the
    one that wrote the samples.
    """

    fingerprint: str
    samples: int
    tokens: int
    loss_tokens: int
    max_length: int
    token_counts: Mapping[int, int] = field(repr=False)
    chat_template: str = ""


@dataclass(frozen=True)
class Sample:
    """One sample with its features: token_ids_T int64, loss_mask_T bool, features [T, H] each."""

    id: SampleId
    token_ids_T: Tensor
    loss_mask_T: Tensor
    features: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> Sample:
        return dataclasses.replace(
            self,
            token_ids_T=self.token_ids_T.to(device, non_blocking=True),
            loss_mask_T=self.loss_mask_T.to(device, non_blocking=True),
            features={n: v.to(device, non_blocking=True) for n, v in self.features.items()},
        )


@dataclass(frozen=True)
class DraftBatch:
    """A collated batch: right-padded rows; masks are true where a token counts."""

    ids: tuple[SampleId, ...]
    token_ids_BT: Tensor
    loss_mask_BT: Tensor
    attention_mask_BT: Tensor
    features: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> DraftBatch:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return dataclasses.replace(
            self,
            token_ids_BT=moved(self.token_ids_BT),
            loss_mask_BT=moved(self.loss_mask_BT),
            attention_mask_BT=moved(self.attention_mask_BT),
            features={name: moved(value) for name, value in self.features.items()},
        )


@dataclass(frozen=True)
class StepContext:
    """Where a step stands in its run; schedules need `total_steps`, random choices `seed`."""

    step: int
    total_steps: int
    seed: int


@dataclass(frozen=True)
class StepOutput:
    """A loss as one ratio, so that any split of samples over micro-batches gives one update.

    `numerator` carries the gradient; `denominator` is detached. `counts` maps each metric to
    its (numerator, denominator), which add up over micro-batches and ranks before the division.
    """

    numerator: Tensor
    denominator: Tensor
    counts: Mapping[str, tuple[Tensor, Tensor]]


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
    """

    module: torch.nn.Module
    config: Mapping[str, Any]
    defaults: TrainingDefaults
    parameter_groups: Sequence[Mapping[str, Any]]
    frozen: frozenset[str] = frozenset()
    wrap_units: tuple[str, ...] = ()
