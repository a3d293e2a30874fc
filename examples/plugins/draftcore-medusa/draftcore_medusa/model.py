"""The Medusa draft: K heads that look at one hidden state of the target, each one token further.

There is no embedding, no attention and no cache. A head is a few residual layers in front of the
target's own LM head, which is frozen and shared by all of them: a buffer outside the state dict, in
the target's own dtype. A fresh head is the identity, so that it starts by predicting what the target
itself predicts.

Shape letters: B batch, T tokens, S = T - (2+i) positions that have a token for head i, R rows that
count, H hidden, V vocabulary, K heads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from draftcore_nn.layers import compute_dtype
from draftcore_nn.losses import cross_entropy
from draftcore_nn.target import dtype_name
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import Draft, DraftBatch, StepOutput, TrainingDefaults
from draftcore.contracts.capture import FeatureRequest

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes a draft's tensors."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int


class Block(nn.Module):
    """The residual layers h + SiLU(W h + b) of one head. W and b start at zero: the identity."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


class MedusaDraft(nn.Module):
    """The heads with their loss. Given the state at position t, head i predicts token t+2+i."""

    target_head: Tensor

    def __init__(self, config: DraftConfig, decay: float, head_VH: Tensor) -> None:
        super().__init__()
        self.config, self.decay = config, decay
        self.blocks = nn.ModuleList(
            Block(config.hidden_size, config.num_layers) for _ in range(config.num_heads)
        )
        self.register_buffer("target_head", head_VH, persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products here and now: autocast's, or the weights'."""
        return compute_dtype(next(self.parameters()))

    @property
    def head(self) -> Tensor:
        """The target's LM head in the compute dtype, [V, H]."""
        return self.target_head.to(self.compute_dtype)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return every head's logits from one hidden state per row, [B, K, V]."""
        hidden_BH = hidden_BH.to(self.compute_dtype)
        return torch.stack([block(hidden_BH) for block in self.blocks], 1) @ self.head.T

    def forward(self, batch: DraftBatch) -> StepOutput:
        """Return the loss, sum_i decay^i * the mean cross entropy of head i: one term per head.

        Head i counts where the loss mask has its label, token t+2+i (the target's own head has t+1).
        Metrics: `accuracy_i` of head i, and `acceptance_length`, the mean over positions that head 0
        learns from of 1 + the number of leading heads that are right: a round of decoding, where the
        data is what the target writes.
        """
        tokens_BT, mask_BT, terms, counts = batch.token_ids_BT, batch.loss_mask_BT, [], {}
        hits_KBT = mask_BT.new_zeros(self.config.num_heads, *mask_BT.shape)
        for i, block in enumerate(self.blocks):
            mask_BS = mask_BT[:, i + 2 :]
            label_R, number = tokens_BT[:, i + 2 :][mask_BS], mask_BS.sum()
            hidden_RH = batch.features["last_hidden"][:, : mask_BS.shape[1]][mask_BS]
            hidden_RH = block(hidden_RH.to(self.compute_dtype))
            loss_R, best_R = cross_entropy(hidden_RH, self.head, label_R)
            hits_KBT[i, :, : mask_BS.shape[1]][mask_BS] = best_R == label_R
            terms.append((loss_R.sum(), number, self.decay**i))
            counts[f"accuracy_{i}"] = (hits_KBT[i].sum(), number)
        starts_BS, leading_BT = mask_BT[:, 2:], hits_KBT.long().cumprod(0).sum(0)
        length = (leading_BT[:, : starts_BS.shape[1]] + 1)[starts_BS].sum()
        counts["acceptance_length"] = (length, starts_BS.sum())
        return StepOutput(terms=terms, counts=counts)


def request(dtype: torch.dtype) -> FeatureRequest:
    """Return what the draft reads of a target computing in `dtype`: its last hidden state alone."""
    return FeatureRequest((), last_hidden=True, dtype=dtype_name(dtype))


def build(target: TargetSpec, config: DraftConfig, decay: float) -> Draft:
    """Build a draft with fresh heads. The defaults are those of the authors' training script."""
    module = MedusaDraft(config, decay, target.head())
    return Draft(
        module=module,
        config=asdict(config),
        defaults=TrainingDefaults(lr=1e-3, warmup_ratio=0.1, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=frozenset({"target_head"}),
        wrap_units=tuple(f"blocks.{i}" for i in range(config.num_heads)),
    )
