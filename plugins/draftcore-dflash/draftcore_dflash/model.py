"""The DFlash draft: a Qwen3-shaped decoder over blocks, which attends to the target's states.

The target's captured layers become one context vector per position. Every layer takes keys and
values of that same vector (not layer-normed, never updated) and of its own block; queries come from
the block alone. Embedding and head are the target's: frozen buffers outside the state dict, in the
target's own dtype.

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, R rows with weight, H hidden,
A query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from draftcore_nn.layers import (
    Projections,
    RMSNorm,
    Rotary,
    SwiGLU,
    TargetVocabulary,
    full_precision,
    rotate,
)
from draftcore_nn.losses import cross_entropy
from torch import Tensor, nn

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_dflash.attention import AttentionMask, attend
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks
from draftcore_dflash.config import SLIDING, DraftConfig
from draftcore_dflash.loss import dpace_weights, metrics, scatter

if TYPE_CHECKING:
    from draftcore_dflash.options import BackboneOptions, DFlashOptions

Angles = tuple[Tensor, Tensor]  # cosines and sines of the rows' positions, see `Rotary`


class Attention(Projections):
    """Grouped-query attention with a norm per head of queries and keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_H: Tensor, angles: Angles) -> Tensor:
        """Return rotated queries [..., A, D]."""
        query_AD = torch.unflatten(self.q_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.q_norm(query_AD), *angles)

    def keys_values(self, x_H: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [..., G, D] of block states or of the context."""
        key_GD = torch.unflatten(self.k_proj(x_H), -1, (-1, self.head_dim))
        value_GD = torch.unflatten(self.v_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.k_norm(key_GD), *angles), value_GD

    def expand(self, x_GD: Tensor) -> Tensor:
        """Repeat key/value heads [..., G, D] for the query heads that share them."""
        queries, keys = self.heads
        return x_GD if queries == keys else x_GD.repeat_interleave(queries // keys, -2)


class DecoderLayer(nn.Module):
    """One layer; `forward` is for training, a cached decoder uses the parts."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def forward(
        self, hidden_MSH: Tensor, context_BTH: Tensor, angles: Angles, context_angles: Angles,
        slot_M: Tensor, mask: AttentionMask,
    ) -> Tensor:  # fmt: skip
        attn, x_MSH = self.self_attn, self.input_layernorm(hidden_MSH)
        key_MSAD, value_MSAD = map(attn.expand, attn.keys_values(x_MSH, angles))
        key_BTAD, value_BTAD = map(attn.expand, attn.keys_values(context_BTH, context_angles))
        attended_MSAD = attend(
            attn.queries(x_MSH, angles), key_MSAD, value_MSAD,
            key_BTAD.transpose(1, 2), value_BTAD.transpose(1, 2), slot_M, mask,
        )  # fmt: skip
        return self.finish(hidden_MSH, attended_MSAD)

    def finish(self, hidden_H: Tensor, attended_AD: Tensor) -> Tensor:
        """Add attention's output and the MLP to the layer's input."""
        hidden_H = hidden_H + self.self_attn.o_proj(attended_AD.flatten(-2))
        return hidden_H + self.mlp(self.post_attention_layernorm(hidden_H))  # type: ignore[no-any-return]


class Backbone(TargetVocabulary):
    """The block decoder, without a loss."""

    def __init__(
        self,
        config: DraftConfig,
        options: BackboneOptions,
        embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:
        super().__init__(embedding_VH, head_VH)
        self.config, self.options = config, options
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(width, eps)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    def typed_layers(self) -> Iterator[tuple[DecoderLayer, str]]:
        """Yield each layer with its type."""
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            assert isinstance(layer, DecoderLayer)
            yield layer, kind

    def context(self, features: Mapping[str, Tensor]) -> Tensor:
        """Join the captured layers, [..., H] each, into one context vector per position."""
        names = (f"hidden.{layer}" for layer in self.config.layers)
        joined = torch.cat([features[name].to(self.compute_dtype) for name in names], -1)
        return self.hidden_norm(self.fc(joined))  # type: ignore[no-any-return]

    def masked_block(self, first_M: Tensor) -> Tensor:
        """Return the tokens of blocks that start with a known one: [token, mask, ...], [M, S]."""
        rest = first_M.new_full(
            (len(first_M), self.config.block_size - 1), self.config.mask_token_id
        )
        return torch.cat([first_M[:, None], rest], 1)

    def block_hidden(self, batch: DraftBatch, blocks: Blocks) -> Tensor:
        """Run blocks against their samples' contexts; returns normed states [M, S, H]."""
        config, shape = self.config, batch.token_ids_BT.shape
        context_BTH = self.context(batch.features)
        first_M = batch.token_ids_BT[blocks.sample_M, blocks.anchor_M]
        hidden_MSH = self.embed(self.masked_block(first_M))
        angles = self.rotary(blocks.positions(config.block_size))
        context_angles = self.rotary(torch.arange(shape[1], device=first_M.device))
        masks = {
            kind: AttentionMask.of(
                blocks, (shape[0], shape[1]), config.block_size,
                window=config.sliding_window if kind == SLIDING else None,
                causal=config.causal(kind), dtype=hidden_MSH.dtype,
            )
            for kind in set(config.layer_types)
        }  # fmt: skip
        for layer, kind in self.typed_layers():
            hidden_MSH = layer(
                hidden_MSH, context_BTH, angles, context_angles, blocks.slot_M, masks[kind]
            )
        return self.norm(hidden_MSH)  # type: ignore[no-any-return]


class DFlashDraft(Backbone):
    """The draft with its loss: `forward` draws anchors and trains on their blocks."""

    options: DFlashOptions

    def forward(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.loss(batch, draw_blocks(batch, self.options.num_anchors, context.seed))

    def loss(self, batch: DraftBatch, blocks: Blocks) -> StepOutput:
        """Return the loss of given blocks. Metrics: `accuracy` and `acceptance_length`.

        `ce`: numerator sum(w CE), denominator sum(w). D-PACE: numerator sum(w CE), denominator the
        number of samples that have a row to learn.
        """
        options, hidden_MSH = self.options, self.block_hidden(batch, blocks)
        block_size, gamma = self.config.block_size, options.loss_decay_gamma
        exact = torch.promote_types(hidden_MSH.dtype, torch.float32)
        targets = Targets.of(batch, blocks, block_size, gamma, exact)
        index_R = targets.valid_MS.flatten().nonzero()[:, 0]
        hidden_RH = hidden_MSH.flatten(0, 1).index_select(0, index_R)
        label_R = targets.token_MS.flatten()[index_R]
        loss_R, best_R = cross_entropy(hidden_RH, self.head, label_R)
        with full_precision(loss_R.device):
            weight_MS, denominator = targets.weight_MS, targets.weight_MS.sum()
            if options.loss != "ce":
                nll_MS = scatter(loss_R.detach(), index_R, targets.valid_MS)
                weight_MS = dpace_weights(options, nll_MS, targets.valid_MS)
                learning_B = torch.zeros(len(batch.token_ids_BT), device=loss_R.device, dtype=exact)
                learning_B[blocks.sample_M[targets.valid_MS.any(-1)]] = 1.0
                denominator = learning_B.sum()
            numerator = (loss_R * weight_MS.flatten()[index_R]).sum()
        hits_MS = scatter(best_R == label_R, index_R, targets.valid_MS)
        return StepOutput(numerator, denominator, metrics(hits_MS, targets.valid_MS, exact))
