"""What an algorithm is given and what it returns: samples, batches, losses, drafts, drafters.

Shape letters: B rows, T tokens, H width, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.contracts.capture import FeatureRequest


@dataclass(frozen=True)
class SampleId:
    """One training use of captured features."""

    feature_id: str
    epoch: int


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


class OnDevice:
    """A record of tensors, and mappings of them, that move together."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on a device, which is not waited for."""

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: moved(one) for name, one in value.items()}
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
    """A collated batch: right-padded rows; masks are true where a token counts."""

    ids: tuple[SampleId, ...]
    token_ids_BT: Tensor
    loss_mask_BT: Tensor
    attention_mask_BT: Tensor
    features: Mapping[str, Tensor]


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


class Drafter(Protocol):
    """A reference decoder over a fixed batch with preallocated KV; no host sync in `propose`.

    Positions: `prefill` takes the prompt's tokens, their target features and the first generated
    token; `accept` takes what the target verified in a round, left-aligned. A state is tensors, batch
    first, in dataclasses, dicts, lists or tuples; weights are read at every call (see `graphs`).

    Shape letters: B rows, T tokens, K drafted tokens (`num_drafts`), V vocabulary.
    """

    num_drafts: int
    request: FeatureRequest

    def allocate(self, batch: int, max_len: int) -> Any:
        """Return a state with KV for `batch` rows of up to `max_len` positions."""

    def prefill(
        self,
        state: Any,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        """Read right-padded prompts of `lengths_B` tokens, with their features, [B, T, H] each.

        `next_B` is the token that the target generated first; the next proposal goes on from it.
        """

    def propose(
        self, state: Any, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens_BK and, when sampling, the probabilities_BKV they were drawn from."""

    def accept(
        self, state: Any, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Take over a verified round.

        `tokens_BK` holds K+1 tokens a row, of which the first counts_B (accepted drafts, then the
        target's own token) are new; `features` are the target's for the K+1 positions it read
        (the last token of the round before, then the drafts), of which counts_B are valid.
        """

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """Return a state that keeps only these rows, in this order."""
