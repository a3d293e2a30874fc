"""The Medusa draft: K heads that look at one hidden state of the target, each one token further.

What is odd about it: there is no embedding, no attention and no cache. A head is a few residual
layers in front of the target's own LM head, which is frozen and shared by all of them: a buffer
outside the state dict, in the target's own dtype. A fresh head is the identity, so that it starts
by predicting what the target itself predicts.

Shape letters: B batch, T tokens, H hidden, V vocabulary, K heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import Draft, DraftBatch, StepOutput, TrainingDefaults
from draftcore.contracts.capture import FeatureRequest
from draftcore_medusa.loss import medusa_loss

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_medusa.options import MedusaOptions


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes a draft's tensors."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int

    @classmethod
    def of(cls, target: TargetSpec, options: MedusaOptions) -> DraftConfig:
        width = int(target.text_config.hidden_size)
        return cls(width, target.vocab_size, options.num_heads, options.num_layers)


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
        weight = next(self.parameters())
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    @property
    def head(self) -> Tensor:
        """The target's LM head in the compute dtype, [V, H]."""
        return self.target_head.to(self.compute_dtype)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Every head's logits from one hidden state per row, [B, K, V]."""
        hidden_BH = hidden_BH.to(self.compute_dtype)
        return torch.stack([block(hidden_BH) for block in self.blocks], 1) @ self.head.T

    def forward(self, batch: DraftBatch) -> StepOutput:
        return medusa_loss(self, batch)


def request(dtype: torch.dtype) -> FeatureRequest:
    """What the draft reads of a target that computes in `dtype`: its last hidden state alone."""
    return FeatureRequest((), last_hidden=True, dtype=str(dtype).removeprefix("torch."))


def build(target: TargetSpec, config: DraftConfig, decay: float) -> Draft:
    """Build a draft with fresh heads. The defaults are those of the authors' training script."""
    module = MedusaDraft(config, decay, target.head())
    return Draft(
        module=module,
        config=dataclasses.asdict(config),
        defaults=TrainingDefaults(lr=1e-3, warmup_ratio=0.1, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=frozenset({"target_head"}),
        wrap_units=tuple(f"blocks.{i}" for i in range(config.num_heads)),
    )
