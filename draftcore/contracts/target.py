"""The target model as plugins see it: a description to train against, a model to run.

A kind of target is a plugin's (hook `target`). Shape letters: B batch, T tokens, S cache
slots, H hidden, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.contracts.capture import FeatureRequest, ImageProcessor

# By layer its keys and its values, [B, S, heads, D]: a token's slot is its position in its row.
# A recurrent layer has states, [B, ...], behind them; what `allocate` adds for those is the model's own.
TargetCache: TypeAlias = "list[list[Tensor]]"


class PrefillRunner(Protocol):
    """Runs the target's forward for capture, eagerly or through graphs."""

    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        """Run right-padded rows once; return [B, T, H] or [B, T, K] per feature, in its dtype."""


class TargetSpec(Protocol):
    """A target's config, tokenizer and tensors; all but the config is read by methods, once.

    `text_config` is the language model's part of `config`, the same for a text-only model: any object that
    has, by transformers' names, `model_type`, `hidden_size`, `max_position_embeddings`, and what else drafts
    take over where a target has it: `num_attention_heads`, `num_key_value_heads`, `head_dim`,
    `intermediate_size`, `rms_norm_eps`, `rope_parameters`. The algorithm's options say the rest.
    Its logits are the last hidden state x `head()` x `logit_scale`; where there is a `logit_softcap` c,
    then c x tanh(logits / c).
    `source` is the revision, and whether the model's own code may run, as `from_pretrained` takes them;
    empty for a target that transformers does not read.
    Options may have `tensor_parallel`, which launchers read: so many devices a process that captures takes.
    `settings` are those that change a bit of its features, beside its fingerprint and dtype: they are part
    of what features are known by. A run sets `prefill_with`, which makes what runs the model for capture,
    and `images`, which reads what a target takes beside text; None of one that takes text alone.
    """

    path: str
    revision: str | None
    source: dict[str, Any]
    device: str
    dtype: torch.dtype
    config: Any
    text_config: Any
    num_layers: int
    vocab_size: int
    logit_scale: float
    logit_softcap: float | None
    settings: Mapping[str, Any]
    devices: int  # that share it in each process that captures
    is_multimodal: bool  # it takes images, too
    images: ImageProcessor | None
    prefill_with: Callable[[TargetModel], PrefillRunner]

    def load_tokenizer(self) -> Any:
        """Return the tokenizer; raises UsageError for a target that has none."""

    def load_model(self) -> TargetModel:
        """Return the running target, which capture and decoding share."""

    def fingerprint(self) -> str:
        """Return a digest that tells this target from another; it reads all weights."""

    def weight_bytes(self) -> int:
        """Return the size of the stored weights."""

    def require_layers(self, request: FeatureRequest, here: bool = False) -> None:
        """Raise UsageError for a layer, or a number of logits, that the target does not have.

        Where its model is to run `here`, also for a device that is not there, and for weights that would
        not load, as far as that is known in seconds: it is asked before rows are rendered.
        """

    def embedding(self) -> Tensor:
        """Return the token embedding, [V, H], in the stored dtype."""

    def head(self) -> Tensor:
        """Return the LM head, [V, H]; the embedding where the two are tied."""

    def capped(self, logits: Tensor) -> Tensor:
        """Scale and cap what the head gives, as the model does."""


class TargetModel(PrefillRunner, Protocol):
    """The running target, frozen: features for capture, cached forwards for decoding.

    Generation stops at the `end_tokens`.
    """

    spec: TargetSpec
    device: torch.device
    dtype: torch.dtype
    end_tokens: frozenset[int]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of last hidden states [..., H], scaled and capped; [..., V]."""

    def allocate(self, batch: int, max_len: int) -> TargetCache:
        """Return an empty cache for `batch` rows of up to `max_len` tokens."""

    def forward(
        self, cache: TargetCache, tokens_BT: Tensor, starts_B: Tensor, span: int,
        request: FeatureRequest, seen_BTT: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Read tokens from a position of each row on, keeping what the next are read with.

        Returns what is requested, and `last_hidden`, [B, T, H]; states are in the model's dtype, logits in
        fp32. Tokens from that position on that were read before are no longer there.

        `span` bounds the slots (exclusive), known on the host, so attention covers only those in
        use. A row's query at position p sees its slots 0..p. The tokens of a tree come with
        `seen_BTT`: the ones that each follows, and itself. Their slots are as they stand, the root
        first; their positions are as deep as they are in the tree. Raises UsageError for a tree where
        layers are recurrent.
        """

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily in a way that shares nothing with `forward`, up to an end token."""

    def top2_gap(self, tokens: Sequence[int]) -> float:
        """Return the gap between the two best next-token logits after `tokens`, in a wider type."""

    def check(self) -> None:
        """Raise unless last hidden x head gives the model's own log-probabilities on some tokens."""
