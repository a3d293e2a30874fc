"""What an algorithm says of its draft being served.

`DraftInput` and the records above it are for prefill/decode disaggregation: beside the KV cache a
prefill server sends one *row* per request, of fixed columns, and the algorithm makes its first draft
input of these rows. `ServedDraft` and the records above it are for the second reading of an export:
a plugin implements its draft a second time, in the plainest way and from a server's conventions
alone (one sequence, no cache, fp32, one whole forward per question), so that nothing which export
and training have in common can hide a mistake from who compares the two.

Layer ids are 0-based outputs, as everywhere: output k is `hidden_states[k + 1]` of transformers.

Shape letters: B requests, T tokens, H hidden, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from draftcore.errors import DraftcoreError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.contracts.target import TargetSpec

FieldName = Literal["hidden", "topk_p", "topk_index"]
WIRE_COLUMNS = 16  # of `topk_p` and `topk_index`; `hidden` is as wide as the draft's state

# ---------------------------------------------------------------- the first draft input


@dataclass(frozen=True)
class DraftShape:
    """What the widths of a row depend on: the draft as it is served, never the target.

    `hidden_size` and `dtype` are those of the state that the draft hands from step to step.
    `layers` is 1 unless every step has a draft layer of its own, which proposes its own `topk`.
    """

    hidden_size: int
    dtype: str
    topk: int = 1
    layers: int = 1

    @property
    def proposals(self) -> int:
        return self.topk * self.layers


@dataclass(frozen=True)
class RowField:
    """One field of a row: `width` columns on the wire, the first `needed` of which are filled."""

    name: FieldName
    width: int
    dtype: str
    needed: int


def hidden_field(shape: DraftShape) -> RowField:
    """The state that the draft goes on from, of the last token that was prefilled."""
    return RowField("hidden", shape.hidden_size, shape.dtype, shape.hidden_size)


def topk_fields(shape: DraftShape) -> tuple[RowField, RowField]:
    """The draft's first proposals, best first, layer after layer, with their probabilities."""
    k = shape.proposals
    return (
        RowField("topk_p", WIRE_COLUMNS, "float32", k),
        RowField("topk_index", WIRE_COLUMNS, "int64", k),
    )


@dataclass(frozen=True)
class DisaggBatch:
    """What the hook gets: rows that were checked, stacked on the device of the lengths.

    A field that the algorithm's row leaves out has no columns.
    """

    rids: tuple[str, ...]
    seq_lens_B: Tensor
    hidden_BH: Tensor
    topk_p_BK: Tensor
    topk_index_BK: Tensor


@dataclass(frozen=True)
class DraftInput:
    """The first draft input: the state each request's draft goes on from, and what it proposes.

    hidden_BH: floating point, the *draft's* state; topk_p_BK float32 and topk_index_BK int64: the
    first proposals, best first; last_tokens_B int64: the token each request continues from. What
    an algorithm does not need has no columns. An empty batch has B = 0.
    """

    hidden_BH: Tensor
    topk_p_BK: Tensor
    topk_index_BK: Tensor
    last_tokens_B: Tensor


def nothing_to_go_on(last_tokens_B: Tensor) -> DraftInput:
    """The input of an algorithm that starts from the last token alone: typed, without columns."""
    none = last_tokens_B.new_zeros(len(last_tokens_B), 0)
    return DraftInput(none.float(), none.float(), none.long(), last_tokens_B)


# ---------------------------------------------------------------- an export, read a second time


class UnservableError(DraftcoreError):
    """A server would refuse the export, or compute with what nothing in it defines."""


@dataclass(frozen=True)
class Host:
    """The target as a server holds it; a draft may borrow embedding and head, [V, H] in fp32."""

    num_layers: int
    vocab_size: int
    hidden_size: int
    rope: Mapping[str, Any]
    tokenizer: Any
    embedding_VH: Tensor
    head_VH: Tensor

    @classmethod
    def of(cls, target: TargetSpec, device: torch.device | str = "cpu") -> Host:
        text = target.text_config
        rope = dict(getattr(text, "rope_parameters", None) or {})
        return cls(
            target.num_layers,
            target.vocab_size,
            int(text.hidden_size),
            dict(rope.get("full_attention") or rope),
            target.load_tokenizer(),
            target.embedding().to(device).float(),
            target.head().to(device).float(),
        )


@dataclass(frozen=True)
class Round:
    """Where a server stands when it drafts.

    tokens_T: what the target has read; last: the token it chose then; hidden: the outputs [T, H] of
    the captured layers at these tokens, in the draft's order; last_hidden_TH: the states after the
    final norm, for drafts that read them.
    """

    host: Host
    tokens_T: Tensor
    last: int
    hidden: tuple[Tensor, ...]
    last_hidden_TH: Tensor


class ServedDraft(Protocol):
    """An export read by one server's conventions.

    `facts` are what it says of itself, of these as many as it says: vocab_size, hidden_size,
    num_target_layers, mask_token_id, rope_theta, dtype. `ignored` names tensors that the server
    leaves unread. `most` is how many tokens a round can draft; None where any number.
    """

    @property
    def server(self) -> str: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def most(self) -> int | None: ...

    def captured(self, host: Host) -> tuple[int, ...]:
        """The layers whose outputs the server would feed, in order. Raises UnservableError."""

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Logits [K + 1, V] of the proposals 0..K, those before K being these drafts.

        Tokens that the draft cannot propose have -inf. Raises UnservableError.
        """

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterable[Suspect]:
        """What may be wrong where this draft is not the trained one, most frequent first.

        `trained` is `Draft.config` of that one.
        """


@dataclass(frozen=True)
class Suspect:
    """One mistake: `cause` says in plain words what is so if `draft`, without it, is right."""

    cause: str
    draft: ServedDraft
