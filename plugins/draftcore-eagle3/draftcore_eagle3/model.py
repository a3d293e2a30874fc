"""The EAGLE-3 draft: Llama layers, most often one, between features of the target and its next tokens.

Unlike a Llama layer the first reads the RMS-normed token embedding and the RMS-normed hidden input side
by side, so the inputs of q/k/v are 2H wide; the residual is the hidden input before its norm. The half
of q/k/v that comes from the embedding depends on the token alone: training projects it once and
shifts it from step to step (`Attention.split_weight`). The target's embedding and head are buffers
outside the state dict, in the target's own dtype; whatever uses them casts.

Shape letters: B batch, T tokens, N active and M supervised rows (see `loss`), H hidden, V target and
U draft vocabulary, A query heads, G key/value heads, D head width, Q = (A + 2G) * D.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import (
    Projections,
    RMSNorm,
    Rotary,
    SwiGLU,
    TargetVocabulary,
    compute_dtype,
    full_precision,
    init_linears,
    rotate,
    take,
)
from draftcore_nn.losses import teach
from draftcore_nn.target import target_tensors
from draftcore_nn.vocabulary import to_ids, to_offsets
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import Draft, DraftBatch, StepOutput, TrainingDefaults
from draftcore_eagle3.attention import Keys
from draftcore_eagle3.config import DraftConfig
from draftcore_eagle3.loss import Rows, distill

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_eagle3.options import BackboneOptions, Eagle3Options

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # [..., A, D] of queries, keys and values


class Attention(Projections):
    """Grouped-query attention, whose q/k/v are made side by side, [..., Q]."""

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def split_weight(self) -> tuple[Tensor, Tensor]:
        """Return the first layer's q/k/v weight as its embedding half and its hidden half, [Q, H] each.

        They are cast here, once for all steps.
        """
        parts = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        weight = torch.cat([part.to(compute_dtype(part)) for part in parts])
        embedding_half, hidden_half = weight.chunk(2, dim=1)
        return embedding_half, hidden_half

    def heads_of(self, qkv_Q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., Q] into rotated queries [..., A, D], rotated keys and values [..., G, D]."""
        queries, keys = self.heads
        x_AD = torch.unflatten(qkv_Q, -1, (queries + 2 * keys, self.head_dim))
        rotated, value_GD = torch.split(x_AD, [queries + keys, keys], -2)
        query_AD, key_GD = torch.split(rotate(rotated, cos, sin), [queries, keys], -2)
        return query_AD, key_GD, value_GD


class DecoderLayer(nn.Module):
    """A layer, in two halves around attention, which differs between training and decoding."""

    inputs = 1  # how many states H wide the q/k/v are made of

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config, self.inputs * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def forward(
        self, embedding_H: Tensor, hidden_H: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Run the layer; `attend` gets rotated queries and keys, and values, see `Attention.heads_of`."""
        qkv = self.project(embedding_H, hidden_H)
        return self.finish(hidden_H, attend(*self.self_attn.heads_of(qkv, *angles)))

    def project(self, embedding_H: Tensor, hidden_H: Tensor) -> Tensor:
        """Return q/k/v side by side, [..., Q], not yet rotated; the first layer alone reads embeddings."""
        return self.self_attn.project(self.input_layernorm(hidden_H))

    def finish(self, hidden_H: Tensor, attended_AD: Tensor) -> Tensor:
        """Add attention's output and the MLP to the hidden input; returns the layer's output."""
        hidden_H = hidden_H + self.self_attn.o_proj(attended_AD.flatten(-2))
        return hidden_H + self.mlp(self.post_attention_layernorm(hidden_H))  # type: ignore[no-any-return]


class FirstLayer(DecoderLayer):
    """The layer that reads the token's embedding beside its hidden input."""

    inputs = 2

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, embedding_H: Tensor, hidden_H: Tensor) -> Tensor:
        x = torch.cat([self.input_layernorm(embedding_H), self.hidden_norm(hidden_H)], -1)
        return self.self_attn.project(x)


class Backbone(TargetVocabulary):
    """The network, without a loss.

    `ids_U` are the draft vocabulary's ascending target ids (None for the full vocabulary), and
    `target_logits` the scale and the soft cap of the target's logits.
    """

    first: type[FirstLayer] = FirstLayer
    target_logits: tuple[float, float | None] = (1.0, None)
    d2t: Tensor | None

    def __init__(
        self, config: DraftConfig, options: BackboneOptions, embedding_VH: Tensor,
        head_VH: Tensor | None, ids_U: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(embedding_VH, head_VH)
        self.config, self.options = config, options
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(3 * config.fc_norm))
        self.midlayer = self.first(config)
        # Named as in files, where the first is `midlayer` for the servers of one layer.
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(config) for i in range(1, config.num_layers)}
        )
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self.register_buffer("d2t", None if ids_U is None else to_offsets(ids_U))

    def token_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, [U]; None for the full vocabulary."""
        return None if self.d2t is None else to_ids(self.d2t)

    @property
    def target_dtype(self) -> torch.dtype:
        """The dtype of the target's tensors, in which servers compute."""
        return (self.embed_tokens if self.target_head is None else self.target_head).dtype

    def stack(self) -> list[DecoderLayer]:
        """Return the layers in their order."""
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def combine(self, features: Mapping[str, Tensor]) -> Tensor:
        """Join the captured layers, [..., H] each, into the first hidden input [..., H]."""
        names = (f"hidden.{layer}" for layer in self.config.layers)
        parts = [features[name].to(self.compute_dtype) for name in names]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(parts, -1))  # type: ignore[no-any-return]

    def head_and_feedback(self, output_H: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the LM head reads and what the next step reads, of the layer's output."""
        normed_H = self.norm(output_H)
        return normed_H, normed_H if self.config.norm_output else output_H


class Eagle3Draft(Backbone):
    """The draft with its loss: `forward` is one training-time test over a batch."""

    options: Eagle3Options

    def loss(self, batch: DraftBatch) -> StepOutput:
        """Return the loss of a batch, see `forward`; what depends on the mask's values is found here."""
        rows = Rows.of(host_mask(batch), self.options.ttt_length)
        output: StepOutput = self(batch, rows.to(batch.token_ids_BT.device))
        return output

    def forward(self, batch: DraftBatch, rows: Rows) -> StepOutput:
        """Return the loss of a batch and its metrics per step k; this is what `train.compile` compiles.

        `batch.loss_mask_BT` marks supervised rows. For `kl` the numerator is the sum over steps k
        and rows of decay^k * cross entropy, the denominator the number of real rows. The LK losses
        are means of the micro-batch: numerator their value, denominator 1 (0 if nothing is
        supervised). Metrics: `accuracy_k`, `acceptance_rate_k`, `loss_k`.
        """
        options, steps = self.options, self.options.ttt_length
        taught_MH = rows.taught(batch.features["last_hidden"])
        teacher = teach(taught_MH, self.head, *self.target_logits, ids_U=self.token_ids())
        label_M = teacher.label_R.where(rows.real_M, -1)
        slots_KM, there_KM = rows.drafted(steps)
        normed = [take(x, slots_KM[k], there_KM[k]) for k, x in enumerate(self.unroll(batch, rows))]
        with full_precision(slots_KM.device):
            known_M, exact = label_M >= 0, teacher.own_R.dtype
            num_rows, weight_KM = batch.attention_mask_BT.sum().to(exact), there_KM & known_M
            total, loss_K, overlap_KM, best_KM = distill(
                options, torch.stack(normed), self.lm_head.weight, teacher, weight_KM.to(exact),
                num_rows,
            )  # fmt: skip
            denominator, denominator_K = num_rows, num_rows.expand(steps)
            if options.loss != "kl":
                denominator, denominator_K = known_M.any().to(exact), weight_KM.any(-1).to(exact)
            counts = {
                "accuracy": ((best_KM == label_M) & there_KM, there_KM),
                "acceptance_rate": (overlap_KM * weight_KM, weight_KM),
            }
            sums = {n: [x.sum(-1).to(exact) for x in pair] for n, pair in counts.items()}
            sums["loss"] = [loss_K, denominator_K]
        metrics = {f"{n}_{k}": (a[k], b[k]) for n, (a, b) in sums.items() for k in range(steps)}
        return StepOutput(total, denominator, metrics)

    def unroll(self, batch: DraftBatch, rows: Rows) -> Iterator[Tensor]:
        """Yield each step's normed output on the active rows, [N, H].

        Of step 0 all layers but the last run on all rows, as these make the keys of the next layer.
        """
        first, layers, length = self.midlayer, self.stack(), batch.token_ids_BT.shape[1]
        steps, count = self.options.ttt_length, batch.token_ids_BT.numel()
        cos, sin = self.rotary(torch.arange(length + steps, device=batch.token_ids_BT.device))
        embedding_half, hidden_half = first.self_attn.split_weight()

        next_tokens = functional.pad(batch.token_ids_BT[:, 1:], (0, 1)).flatten()
        embedded = first.input_layernorm(self.embed(next_tokens))
        from_token = functional.linear(embedded, embedding_half)
        hidden = self.combine(batch.features).flatten(0, 1)
        row_N = torch.arange(count, device=embedded.device)
        seen: list[Keys] = []
        for step in range(steps):
            later_N, there_N = (row_N + step).clamp_max(count - 1), row_N + step < count
            angles = cos[rows.time_BT[row_N] + step], sin[rows.time_BT[row_N] + step]
            for index, layer in enumerate(layers):
                if index == 0:
                    qkv = take(from_token, later_N, there_N) if step else from_token
                    qkv = qkv + functional.linear(first.hidden_norm(hidden), hidden_half)
                else:
                    qkv = layer.project(embedded, hidden)
                query, key, value = layer.self_attn.heads_of(qkv, *angles)
                if step == 0:
                    seen.append(Keys(key, value, length))
                    if layer is layers[-1]:
                        row_N = rows.active_N
                        query, hidden = take(query, row_N), take(hidden, row_N)
                else:
                    seen[index].add(key, value)
                hidden = layer.finish(hidden, seen[index].attend(query, row_N))
            normed, hidden = self.head_and_feedback(hidden)
            yield normed


def build(
    target: TargetSpec, config: DraftConfig, options: BackboneOptions, ids_U: Tensor | None,
    kind: type[Backbone] = Eagle3Draft,
) -> Draft:  # fmt: skip
    """Build a draft with fresh weights: N(0, 0.02), norms 1, the LM head from the target's rows.

    These are scaled as the target's logits are: the draft's own logits are neither scaled nor capped.
    """
    embedding_VH, head_VH = target_tensors(target)
    module = kind(config, options, embedding_VH, head_VH, ids_U)
    module.target_logits = (target.logit_scale, target.logit_softcap)
    init_linears(module)
    head_VH = embedding_VH if head_VH is None else head_VH
    with torch.no_grad():
        rows_UH = head_VH if ids_U is None else head_VH[ids_U]
        module.lm_head.weight.copy_(rows_UH).mul_(target.logit_scale)
    return Draft(
        module=module,
        config=dataclasses.asdict(config),
        defaults=TrainingDefaults(lr=1e-4, warmup_ratio=0.015, clip=0.5),
        parameter_groups=[{"params": [p for p in module.parameters() if p.requires_grad]}],
        frozen=Backbone.FROZEN,
        about=config.text(config.num_layers),
    )
