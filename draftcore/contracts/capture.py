"""What a capture backend is asked for, and what it returns.

Layer ids are 0-based *outputs of layer k* everywhere. Shape letters: T tokens, H width, K logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from draftcore.errors import DraftcoreError

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.contracts.store import FeatureStore, SampleRef


@dataclass(frozen=True)
class FeatureRequest:
    """The features an algorithm trains on, as data, so that requests can be joined.

    `layers` are 0-based layer outputs (captured as `hidden.<k>`, after the residual add), [T, H];
    `last_hidden` is the state after the final norm; `embeddings` is what the first layer is given.
    `topk` asks for so many of the target's largest logits at each token, descending: `topk_logits`
    [T, K] and their token ids `topk_ids` [T, K], int32; of equal logits the lower id comes first.
    `dtype` is the name of the torch dtype in which all but the ids are stored.
    """

    layers: tuple[int, ...]
    last_hidden: bool
    dtype: str
    topk: int = 0
    embeddings: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FeatureRequest:
        return cls(**{**data, "layers": tuple(data["layers"])})

    @property
    def names(self) -> tuple[str, ...]:
        hidden = tuple(f"hidden.{layer}" for layer in self.layers)
        states = ("last_hidden",) * self.last_hidden + ("embeddings",) * self.embeddings
        return hidden + states + ("topk_logits", "topk_ids") * bool(self.topk)

    def feature_specs(self, width: int) -> dict[str, tuple[int, str]]:
        """Say how many numbers each feature has per token, of a target of this width, and their dtype."""
        topk = {"topk_logits": (self.topk, self.dtype), "topk_ids": (self.topk, "int32")}
        return {name: topk.get(name, (width, self.dtype)) for name in self.names}

    def token_bytes(self, width: int) -> int:
        """Return the bytes of one token's features."""
        import torch

        specs = self.feature_specs(width).values()
        return sum(size * getattr(torch, dtype).itemsize for size, dtype in specs)

    def select(self, features: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
        """Take what this request asks for, in its dtypes, of what a wider one or a model gives."""
        import torch

        dtypes = {name: getattr(torch, dtype) for name, (_, dtype) in self.feature_specs(0).items()}
        cut = {n: features[n][..., : self.topk] if "topk" in n else features[n] for n in dtypes}
        return {name: cut[name].to(dtype, copy=copy) for name, dtype in dtypes.items()}

    def union(self, other: FeatureRequest) -> FeatureRequest:
        """Join two requests of one dtype, storing nothing twice."""
        if self.dtype != other.dtype:
            raise ValueError(f"cannot join features of {self.dtype} with features of {other.dtype}")
        layers = tuple(sorted({*self.layers, *other.layers}))
        last, topk = self.last_hidden or other.last_hidden, max(self.topk, other.topk)
        return FeatureRequest(layers, last, self.dtype, topk, self.embeddings or other.embeddings)


class Image(NamedTuple):
    """An image of a row: an absolute path or data URI, and a digest of its bytes and how it is read."""

    uri: str
    digest: str


class ImageProcessor(Protocol):
    """Reads the images of rows, and lays them out among a row's tokens as the target's own processor does.

    Its `repr` tells one way to do so from another.
    """

    def identity(self) -> str:
        """Return all that images are read by."""

    def write(
        self, text: str, spans: Sequence[tuple[int, int]], uris: Sequence[str]
    ) -> tuple[str, list[tuple[int, int]], list[int], tuple[Image, ...]]:
        """Write images' tokens into a text; return it, the spans in it, all its tokens, and the images.

        Raises `RowError` for an image that cannot be read, and where the processor refuses.
        """

    def inputs(self, token_ids: Sequence[int], images: Sequence[Image]) -> Any:
        """Return what the target's forward is given of a row, a BatchFeature of tensors.

        Raises `RowError` for an image that is not what it was when the row was rendered.
        """


@dataclass(frozen=True)
class CaptureBatch:
    """Rows that go through the target together, always in this composition.

    Padding and batch size change the last bits of a forward pass, so a batch is the plan's: it is
    captured whole, and trained on whole. `index` is the batch's number in the plan's cut, `rows` the
    rows' numbers in the dataset, `ids` what a store keeps them under. `images` are each row's, if any
    row has some: its tokens hold their places. Only a capture with the capability `images` is given any.
    """

    index: int
    rows: tuple[int, ...]
    ids: tuple[str, ...]
    token_ids: tuple[Sequence[int], ...]
    images: tuple[tuple[Image, ...], ...] = ()

    def image_inputs(self, processor: ImageProcessor | None) -> dict[int, Any]:
        """Return what the target's forward is given of each row with images, by its number in the batch.

        Raises BadRows for rows whose images cannot be read, or are others than when they were rendered.
        """
        inputs, bad = dict[int, Any](), dict[int, str]()
        for number, images in enumerate(self.images):
            try:
                if images and processor:  # or no row would have any
                    inputs[number] = processor.inputs(self.token_ids[number], images)
            except RowError as error:
                bad[number] = f"dataset row {self.rows[number]}: {error}"
        if bad:
            raise BadRows(bad)
        return inputs


@dataclass(frozen=True)
class CapturedBatch:
    """Features of a batch: per row a mapping of feature name to a [T, H] or [T, K] tensor."""

    batch: CaptureBatch
    features: tuple[Mapping[str, Tensor], ...]


class RowError(DraftcoreError):
    """A row that cannot be used: raised with a reason, which other rows have too, and its own detail."""

    def __str__(self) -> str:
        return ": ".join(filter(None, self.args))


class BadRows(DraftcoreError):  # noqa: N818  what is wrong with data, not with a capture
    """Rows that cannot be captured however often that is tried, by number in their batch."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("\n".join(reasons.values()))
        self.reasons = dict(reasons)


class Capture(Protocol):
    """An open capture backend. A short row raises; it is never returned.

    Raises UsageError where it cannot work at all, which ends the process that captures; BadRows for
    rows that it cannot capture, which are left out; any other error is tried again: a DraftcoreError
    in this process, all else in one begun anew.
    """

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield each batch's features in the order asked, rows exactly as long as their tokens.

        The device need not be waited for: whoever uses the features checks that they are finite.
        """

    def close(self) -> None: ...


@runtime_checkable
class StoringCapture(Capture, Protocol):
    """A capture in another process that can put features into a store from there."""

    def reaches(self, store: FeatureStore) -> bool:
        """Say whether that process can open this store."""

    def deliver(
        self, batch: CaptureBatch, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]:
        """Capture a batch and put it, as `put_many` does, with `text` and the provenance `origin`."""
