"""How producers reach the queue in the trainer: requests and replies of JSON, never a tensor."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftcore.contracts.capture import CaptureBatch, Image
from draftcore.errors import DraftcoreError

Json = dict[str, Any]
PATIENCE = 600.0  # seconds that a producer waits for a trainer that does not answer


@dataclass(frozen=True)
class Task:
    """A batch to capture, with all that this needs: a producer has neither data nor tokenizer.

    `position` is its place in the plan, `loss_masks` are stored beside the features, `nbytes` is what
    its features will take. `claim` names one handing-out of it.
    """

    position: int
    batch: CaptureBatch
    loss_masks: tuple[Sequence[bool], ...]
    nbytes: int
    claim: str = ""

    def to_json(self) -> Json:
        """Return JSON data: token ids as 32-bit integers, masks as bits, both in base64."""
        import numpy as np  # not where plugins are listed

        tokens = [np.asarray(ids, dtype="<i4") for ids in self.batch.token_ids]
        masks = [np.packbits(np.asarray(mask, dtype=bool)) for mask in self.loss_masks]
        return {
            "position": self.position,
            "nbytes": self.nbytes,
            "claim": self.claim,
            "batch": [self.batch.index, self.batch.rows, self.batch.ids],
            "tokens": [base64.b64encode(ids.tobytes()).decode() for ids in tokens],
            "masks": [base64.b64encode(bits.tobytes()).decode() for bits in masks],
            "images": self.batch.images,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        import numpy as np

        tokens = [np.frombuffer(base64.b64decode(ids), dtype="<i4") for ids in data["tokens"]]
        packed = [np.frombuffer(base64.b64decode(bits), dtype=np.uint8) for bits in data["masks"]]
        masks = [
            np.unpackbits(bits, count=len(ids)).astype(bool).tolist()
            for bits, ids in zip(packed, tokens, strict=True)
        ]
        index, rows, ids = data["batch"]
        images = tuple(tuple(Image(*image) for image in row) for row in data["images"])
        lists = tuple(ids.tolist() for ids in tokens)
        batch = CaptureBatch(index, tuple(rows), tuple(ids), lists, images)
        return cls(data["position"], batch, tuple(masks), data["nbytes"], data["claim"])


class Service(Protocol):
    """What a channel serves: the queue, as requests that it answers. Called from any thread."""

    def answer(self, request: Json) -> Json:
        """Answer a request, which names its `producer`; waits as long as the request says."""

    def lost(self, producer: str) -> None:
        """Hear that a producer's last connection ended: what it had claimed is handed out again."""


class Client(Protocol):
    """A producer's way to the queue."""

    def call(self, request: Json) -> Json:
        """Return the queue's reply to a request. Calls of several threads are made one by one.

        Connects anew where a connection breaks. Raises ChannelAway where the trainer does not answer
        for as long as the channel is patient.
        """

    def close(self) -> None: ...


class Channel(Protocol):
    """Carries requests to the queue and replies back: those of 64 rows of 32k tokens take 12 MB."""

    def serve(self, service: Service) -> str:
        """Answer requests from now on, in threads of its own; returns the address for `connect`."""

    def connect(self, find: Callable[[], str]) -> Client:
        """Reach the queue. `find` returns the address of now, '' while there is none."""

    def close(self) -> None:
        """Serve no more; what is being answered is cut off."""


class ChannelAway(DraftcoreError):  # noqa: N818  a state that producers wait out
    """The trainer did not answer for as long as the channel waits."""


def to_bytes(data: Mapping[str, Any]) -> bytes:
    """Serialise a control record. Raises DraftcoreError for one that is no plain JSON."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise DraftcoreError(
            f"a control record is not plain JSON: {error}\n"
            "  tensors travel through the store, and refs through the channel"
        ) from None
