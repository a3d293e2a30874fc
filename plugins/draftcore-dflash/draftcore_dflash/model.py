"""The DFlash draft: a Qwen3-shaped decoder over blocks, which attends to the target's states.

The target's captured layers become one context vector per position. Every layer takes keys and
values of that same vector (not layer-normed, never updated) and of its own block; queries come from
the block alone. Embedding and head are the target's: frozen buffers outside the state dict, in the
target's own dtype.

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, R rows with weight, H hidden,
V vocabulary, A query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftcore.contracts.algorithm import (
    Draft,
    DraftBatch,
    StepContext,
    StepOutput,
    TrainingDefaults,
)
from draftcore_dflash.attention import Sight, attend, full_precision
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks
from draftcore_dflash.config import SLIDING, DraftConfig
from draftcore_dflash.head import cross_entropy
from draftcore_dflash.loss import Objective, Sampling, dpace_weights, metrics, scatter

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash.options import DFlashOptions

FROZEN = frozenset({"embed_tokens", "target_head"})
Turns = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """RMS normalisation in fp32 (fp64 for fp64 inputs), returned in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(exact)
        return functional.rms_norm(x.to(exact), weight.shape, weight, self.eps).to(x.dtype)


class Rotary(nn.Module):
    """Rotary positions by transformers' own frequencies; D' = the rotated part of a head."""

    inverse_frequency: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rope = dict(config.rope)
        if rope["rope_type"] == "default":
            # Linear scaling by one is the default, and knows the partial rotary factor.
            rope.update(rope_type="linear", factor=1.0)
        qwen = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
        )
        frequency, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](qwen)
        self.scale = float(scale)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, positions: Tensor) -> Turns:
        """Return cosines and sines [..., D'/2] of integer positions [...]."""
        angles = positions[..., None].to(self.inverse_frequency.dtype) * self.inverse_frequency
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x_AD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., A, D] by the angles of their rows, [..., D'/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = cos.shape[-1]
    left, right, rest = torch.split(x_AD, [half, half, x_AD.shape[-1] - 2 * half], -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_AD.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class Attention(nn.Module):
    """The projections of grouped-query attention, with a norm per head of queries and keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (count * config.head_dim for count in self.heads)
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_H: Tensor, turns: Turns) -> Tensor:
        """Return rotated queries [..., A, D]."""
        query_AD = torch.unflatten(self.q_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.q_norm(query_AD), *turns)

    def keys_values(self, x_H: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [..., G, D] of block states or of the context."""
        key_GD = torch.unflatten(self.k_proj(x_H), -1, (-1, self.head_dim))
        value_GD = torch.unflatten(self.v_proj(x_H), -1, (-1, self.head_dim))
        return rotate(self.k_norm(key_GD), *turns), value_GD

    def expand(self, x_GD: Tensor) -> Tensor:
        """Repeat key/value heads [..., G, D] for the query heads that share them."""
        queries, keys = self.heads
        return x_GD if queries == keys else x_GD.repeat_interleave(queries // keys, -2)


class MLP(nn.Module):
    """The feed-forward part of a layer, a SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One layer; `forward` is for training, a cached decoder uses the parts."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate_size)

    def forward(
        self, hidden_MSH: Tensor, context_BTH: Tensor, turns: Turns, context_turns: Turns,
        slot_M: Tensor, sight: Sight,
    ) -> Tensor:  # fmt: skip
        attn, x_MSH = self.self_attn, self.input_layernorm(hidden_MSH)
        key_MSAD, value_MSAD = map(attn.expand, attn.keys_values(x_MSH, turns))
        key_BTAD, value_BTAD = map(attn.expand, attn.keys_values(context_BTH, context_turns))
        attended_MSAD = attend(
            attn.queries(x_MSH, turns), key_MSAD, value_MSAD,
            key_BTAD.transpose(1, 2), value_BTAD.transpose(1, 2), slot_M, sight,
        )  # fmt: skip
        return self.finish(hidden_MSH, attended_MSAD)

    def finish(self, hidden_H: Tensor, attended_AD: Tensor) -> Tensor:
        """Add attention's output and the MLP to the layer's input."""
        hidden_H = hidden_H + self.self_attn.o_proj(attended_AD.flatten(-2))
        return hidden_H + self.mlp(self.post_attention_layernorm(hidden_H))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """The block decoder, without a loss.

    `embedding_VH` and `head_VH` (None where tied) are the target's, kept in their dtype.
    """

    embed_tokens: Tensor
    target_head: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        sampling: Sampling,
        embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:
        super().__init__()
        self.config, self.sampling = config, sampling
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(width, eps)
        self.rotary = Rotary(config)
        self.register_buffer("embed_tokens", embedding_VH, persistent=False)
        self.register_buffer("target_head", head_VH, persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products here and now: autocast's, or the weights'."""
        device = self.fc.weight.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.fc.weight.dtype

    @property
    def head(self) -> Tensor:
        """The target's LM head in the compute dtype, [V, H]."""
        head_VH = self.embed_tokens if self.target_head is None else self.target_head
        return head_VH.to(self.compute_dtype)

    def typed_layers(self) -> Iterator[tuple[DecoderLayer, str]]:
        """Yield each layer with its type."""
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            assert isinstance(layer, DecoderLayer)
            yield layer, kind

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [...] into [..., H]."""
        return functional.embedding(tokens, self.embed_tokens).to(self.compute_dtype)

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
        turns = self.rotary(blocks.positions(config.block_size))
        context_turns = self.rotary(torch.arange(shape[1], device=first_M.device))
        sights = {
            kind: Sight.of(
                blocks, (shape[0], shape[1]), config.block_size,
                window=config.sliding_window if kind == SLIDING else None,
                causal=config.causal(kind), dtype=hidden_MSH.dtype,
            )
            for kind in set(config.layer_types)
        }  # fmt: skip
        for layer, kind in self.typed_layers():
            hidden_MSH = layer(
                hidden_MSH, context_BTH, turns, context_turns, blocks.slot_M, sights[kind]
            )
        return self.norm(hidden_MSH)  # type: ignore[no-any-return]


class DFlashDraft(Backbone):
    """The draft with its loss: `forward` draws anchors and trains on their blocks."""

    def __init__(
        self,
        config: DraftConfig,
        sampling: Sampling,
        objective: Objective,
        embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:
        super().__init__(config, sampling, embedding_VH, head_VH)
        self.objective = objective

    def forward(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.loss(batch, draw_blocks(batch, self.sampling.num_anchors, context.seed))

    def loss(self, batch: DraftBatch, blocks: Blocks) -> StepOutput:
        """Return the loss of given blocks. Metrics: `accuracy` and `acceptance_length`.

        `ce`: numerator sum(w CE), denominator sum(w). D-PACE: numerator sum(w CE), denominator the
        number of samples that have a row to learn.
        """
        hidden_MSH = self.block_hidden(batch, blocks)
        exact = torch.promote_types(hidden_MSH.dtype, torch.float32)
        targets = Targets.of(batch, blocks, self.config.block_size, self.sampling.gamma, exact)
        index_R = targets.valid_MS.flatten().nonzero()[:, 0]
        hidden_RH = hidden_MSH.flatten(0, 1).index_select(0, index_R)
        label_R = targets.token_MS.flatten()[index_R]
        loss_R, best_R = cross_entropy(hidden_RH, self.head, label_R)
        with full_precision(loss_R.device):
            weight_MS, denominator = targets.weight_MS, targets.weight_MS.sum()
            if self.objective.loss != "ce":
                nll_MS = scatter(loss_R.detach(), index_R, targets.valid_MS)
                weight_MS = dpace_weights(self.objective, nll_MS, targets.valid_MS)
                learning_B = torch.zeros(len(batch.token_ids_BT), device=loss_R.device, dtype=exact)
                learning_B[blocks.sample_M[targets.valid_MS.any(-1)]] = 1.0
                denominator = learning_B.sum()
            numerator = (loss_R * weight_MS.flatten()[index_R]).sum()
        hits_MS = scatter(best_R == label_R, index_R, targets.valid_MS)
        return StepOutput(numerator, denominator, metrics(hits_MS, targets.valid_MS, exact))


def target_tensors(target: TargetSpec) -> tuple[Tensor, Tensor | None]:
    """Return the target's embedding and head; None for a head that is the embedding."""
    tied = bool(target.text_config.tie_word_embeddings)
    return target.embedding(), None if tied else target.head()


def build(target: TargetSpec, config: DraftConfig, options: DFlashOptions) -> Draft:
    """Build a draft with fresh weights."""
    module = DFlashDraft(
        config, Sampling.of(options), Objective.of(options), *target_tensors(target)
    )
    return as_draft(module)


def as_draft(module: Backbone) -> Draft:
    """Initialise a module, N(0, 0.02) with norms 1, and say how it is trained."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
    config: dict[str, Any] = dataclasses.asdict(module.config)
    return Draft(
        module=module,
        config=config,
        defaults=TrainingDefaults(lr=6e-4, warmup_ratio=0.04, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=FROZEN,
        wrap_units=tuple(f"layers.{i}" for i in range(len(module.layers))),
    )
