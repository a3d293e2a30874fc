"""The DFlash draft: a Qwen3-shaped decoder over blocks, which attends to the target's states.

The target's captured layers become one context vector per position. Every layer takes keys and
values of that same vector (not layer-normed, never updated) and of its own block; queries come from
the block alone. Embedding and head are the target's: frozen buffers outside the state dict, in the
target's own dtype.

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, R rows with weight, H hidden,
A query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import (
    Projections,
    RMSNorm,
    Rotary,
    SwiGLU,
    TargetVocabulary,
    full_precision,
    rotate,
)
from draftcore_nn.losses import DistributionLosses, cross_entropy, distribution_losses
from torch import Tensor, nn

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_dflash.attention import AttentionMask, KeysValues, Tiles, attend
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.loss import dpace_weights, metrics

if TYPE_CHECKING:
    from draftcore_dflash.options import BackboneOptions, DFlashOptions

Angles = tuple[Tensor, Tensor]  # cosines and sines of the rows' positions, see `Rotary`
# From queries, over a block's own keys and values, and more.
Attend = Callable[[Tensor, KeysValues], Tensor]


class Attention(Projections):
    """Grouped-query attention with a norm per head of queries and keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_H: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Attend from the rows of blocks, which `attend` shows their context, too."""
        own = self.keys_values(x_H, angles)
        return self.o_proj(attend(self.queries(x_H, angles), own).flatten(-2))  # type: ignore[no-any-return]

    def queries(self, x_H: Tensor, angles: Angles) -> Tensor:
        """Return rotated queries [..., A, D]."""
        query_AD = torch.unflatten(self.q_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.q_norm(query_AD), *angles)

    def keys_values(self, x_H: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [..., G, D] of block states or of the context."""
        key_GD = torch.unflatten(self.k_proj(x_H), -1, (-1, self.head_dim))
        value_GD = torch.unflatten(self.v_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.k_norm(key_GD), *angles), value_GD


class DecoderLayer(nn.Module):
    """One layer; `forward` is for training, a cached decoder uses the parts.

    A layer that computes otherwise replaces `run`, which the context does not pass.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def forward(
        self, hidden_MSH: Tensor, context_BTH: Tensor, angles: Angles, context_angles: Angles,
        mask: AttentionMask,
    ) -> Tensor:  # fmt: skip
        context = self.self_attn.keys_values(context_BTH, context_angles)
        return self.run(hidden_MSH, angles, lambda query, own: attend(query, own, context, mask))

    def run(self, hidden_H: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the rows of blocks, [..., S, H], through attention and the MLP."""
        x_H = self.input_layernorm(hidden_H)
        hidden_H = hidden_H + self.self_attn(x_H, angles, attend)
        return hidden_H + self.mlp(self.post_attention_layernorm(hidden_H))  # type: ignore[no-any-return]


class Backbone(TargetVocabulary):
    """The block decoder, without a loss. `target_logits` are the scale and soft cap of the target's."""

    target_logits: tuple[float, float | None] = (1.0, None)

    layer: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(
        self, config: DraftConfig, options: BackboneOptions, embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(embedding_VH, head_VH)
        self.config, self.options = config, options
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(self.layer(config) for _ in config.layer_types)
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
        size = len(first_M), self.config.block_size - 1
        rest = first_M.new_full(size, self.config.mask_token_id)
        return torch.cat([first_M[:, None], rest], 1)

    def tiles(self, batch: DraftBatch, blocks: Blocks) -> dict[str, Tiles]:
        """List, for each type of layer, what blocks on the CPU see; CUDA alone reads it."""
        config, (rows, length) = self.config, batch.token_ids_BT.shape
        return {
            kind: Tiles.of_blocks(
                blocks, (rows, length), config.block_size, config.window(kind)
            ).to(batch.token_ids_BT.device)
            for kind in set(config.layer_types)
            if batch.token_ids_BT.is_cuda
        }

    def block_hidden(
        self, batch: DraftBatch, blocks: Blocks, tiles: Mapping[str, Tiles] | None = None
    ) -> Tensor:
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
                window=config.window(kind), causal=config.causal(kind), dtype=hidden_MSH.dtype,
                tiles=(tiles or {}).get(kind),
            )
            for kind in set(config.layer_types)
        }  # fmt: skip
        for layer, kind in self.typed_layers():
            hidden_MSH = layer(hidden_MSH, context_BTH, angles, context_angles, masks[kind])
        return self.norm(hidden_MSH)  # type: ignore[no-any-return]

    def compare(
        self, batch: DraftBatch, blocks: Blocks, targets: Targets, hidden_RH: Tensor, label_R: Tensor,
        weight_MS: Tensor, mixture: Mapping[str, float], low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> DistributionLosses:  # fmt: skip
        """Compare rows with their labels, and with what the target says there, by its last states."""
        sample_R = targets.take(blocks.sample_M[:, None].expand_as(targets.index_MS))
        last_RH = batch.features["last_hidden"][sample_R, targets.take(targets.index_MS) - 1]
        weight_R = targets.take(weight_MS) * (targets.row_R < targets.valid_MS.numel())
        scale, softcap = self.target_logits
        return distribution_losses(
            hidden_RH, self.head, last_RH, label_R, weight_R, mixture, scale=scale, softcap=softcap,
            low_rank=low_rank,
        )  # fmt: skip


class DFlashDraft(Backbone):
    """The draft with its loss: `loss` draws anchors and trains on their blocks."""

    options: DFlashOptions

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.loss_of(batch, draw_blocks(batch, self.options.num_anchors, context.seed))

    def loss_of(self, batch: DraftBatch, blocks: Blocks) -> StepOutput:
        """Return the loss of given blocks, which lie on the CPU, see `forward`."""
        device, mask_BT = batch.token_ids_BT.device, host_mask(batch)
        targets = Targets.of(mask_BT, blocks, self.config.block_size)
        tiles = self.tiles(batch, blocks)
        output: StepOutput = self(batch, blocks.to(device), targets.to(device), tiles)
        return output

    def forward(
        self, batch: DraftBatch, blocks: Blocks, targets: Targets, tiles: Mapping[str, Tiles]
    ) -> StepOutput:
        """Return the loss; this is what `train.compile` compiles.

        `ce`: numerator sum(w CE), denominator sum(w). D-PACE: numerator sum(w CE), denominator the
        number of samples that have a row to learn. `kl` and the like: as `ce`, with that distance from
        the target's distribution. Metrics: `accuracy` and `acceptance_length`; where the loss reads
        that distribution, the mean overlap with it as `acceptance_rate`.
        """
        options, hidden_MSH = self.options, self.block_hidden(batch, blocks, tiles)
        exact, valid_MS = torch.promote_types(hidden_MSH.dtype, torch.float32), targets.valid_MS
        label_R = targets.labels(batch.token_ids_BT, blocks)
        weight_MS = targets.weights(options.loss_decay_gamma, exact)
        hidden_RH, denominator = targets.take(hidden_MSH), weight_MS.sum()
        if options.distils:
            mixture: dict[str, float] = {options.loss: 1.0}
            found = self.compare(batch, blocks, targets, hidden_RH, label_R, weight_MS, mixture)
            counts = metrics(targets.lay(found.best_R == label_R), valid_MS, exact)
            rate = targets.mean(found.overlap_R)
            return StepOutput(found.objective, denominator, {**counts, "acceptance_rate": rate})
        loss_R, best_R = cross_entropy(hidden_RH, self.head, label_R)
        with full_precision(loss_R.device):
            if options.loss != "ce":
                weight_MS = dpace_weights(options, targets.lay(loss_R.detach()), valid_MS)
                weight_MS = weight_MS * valid_MS
                learning_B = weight_MS.new_zeros(len(batch.token_ids_BT))
                learning_B = learning_B.index_add(0, blocks.sample_M, valid_MS.any(-1).to(exact))
                denominator = (learning_B > 0).sum().to(exact)
            numerator = targets.weigh(loss_R, weight_MS)
            hits_MS = targets.lay(best_R == label_R)
            return StepOutput(numerator, denominator, metrics(hits_MS, valid_MS, exact))
