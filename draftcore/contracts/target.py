"""The target model as plugins see it: a description to train against, a model to run.

`draftcore.target` implements both through transformers. Shape letters: B batch, T tokens, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from draftcore.contracts.capture import FeatureRequest


class PrefillRunner(Protocol):
    """Runs the target's forward for capture, eagerly or through graphs."""

    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        """Run right-padded rows once; return [B, T, H] per feature, in the request's dtype."""
        ...


class TargetSpec(Protocol):
    """A target's config, tokenizer and tensors, read when first needed.

    `prefill_with` makes what runs the model for capture; a run sets it, by its `runner.prefill`.
    """

    path: str
    revision: str | None
    device: str
    dtype: torch.dtype
    config: Any
    prefill_with: Callable[[TargetModel], PrefillRunner]

    @property
    def text_config(self) -> Any:
        """The language model's part of the config; the config itself for a text-only model."""
        ...

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def model(self) -> TargetModel:
        """The running target, loaded once and shared by capture and decoding."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest that tells the weights of this target from another's."""
        ...

    @property
    def weight_bytes(self) -> int:
        """The size of the stored weights."""
        ...

    def require_layers(self, request: FeatureRequest) -> None:
        """Raise UsageError where a request names a layer that the target does not have."""
        ...

    def embedding(self) -> Tensor:
        """Return the token embedding, [V, H], in the stored dtype."""
        ...

    def head(self) -> Tensor:
        """Return the LM head, [V, H]; the embedding where the two are tied."""
        ...


class TargetState(Protocol):
    """KV slots of a batch: a token's slot is its position in its row."""

    def tensors(self) -> list[Tensor]:
        """Return all keys and values there are, each with the batch as its first dimension."""
        ...

    def narrow(self, rows: int) -> TargetState:
        """Return the first rows only, in the same memory; needs a state that was written to."""
        ...


class TargetModel(Protocol):
    """The running target, frozen: features for capture, cached forwards for decoding.

    `model` is the whole transformers model; `decoder` its stack of layers with the final norm.
    """

    spec: TargetSpec
    device: torch.device
    dtype: torch.dtype
    model: Any
    decoder: nn.Module
    head: nn.Module
    layers: nn.ModuleList

    @property
    def end_tokens(self) -> frozenset[int]:
        """The token ids at which the target's generation stops."""
        ...

    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        """Run right-padded rows once, without a cache; return [B, T, H] per requested name."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head to last hidden states [..., H]; returns [..., V]."""
        ...

    def allocate(self, batch: int, max_len: int) -> TargetState:
        """Return an empty cache for `batch` rows of up to `max_len` tokens."""
        ...

    def forward(
        self,
        state: Any,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        span: int,
        request: FeatureRequest,
    ) -> dict[str, Tensor]:
        """Read tokens at their positions, keeping their keys and values; return features [B, T, H].

        `state` came from `allocate`. `span` bounds the positions (exclusive), known on the host, so
        attention covers only the slots in use. Row b's query at position p sees its slots 0..p.
        """
        ...

    def select(self, state: Any, rows_B: Tensor) -> TargetState:
        """Keep only these rows, in this order."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily by transformers' own `generate`, cut after the first end token."""
        ...

    def top2_gap(self, tokens: Sequence[int]) -> float:
        """Return the gap between the two best next-token logits after `tokens`, in a wider type."""
        ...

    def check(self, request: FeatureRequest, prompt: Sequence[int]) -> None:
        """Raise unless last hidden x head gives the model's own log-probabilities on a prompt."""
        ...

    def tapped(self, request: FeatureRequest) -> AbstractContextManager[dict[str, Tensor]]:
        """Collect the outputs of the requested layers during one forward of `decoder`."""
        ...

    def masks(self, positions_BT: Tensor, span: int) -> Any:
        """Return additive masks [B, 1, T, S]: slots up to the query's position, within its window."""
        ...
