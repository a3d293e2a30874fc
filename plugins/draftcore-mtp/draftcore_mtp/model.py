"""The MTP layer of a target, applied several times, and its loss.

Row t reads the embedding of token t+1 beside the target's last state of token t, after the final norm,
and predicts token t+2. Each further step reads the next token and the state that the step before gave,
normed as well. There are two chains:

- `served`, as servers decode: step k of row t is a row at position t+k, which sees the rows of step 0 up
  to t and the steps of its own row. This is EAGLE-3's training-time test, and so are its rows and its
  attention: only rows that meet a label at some step are computed after step 0's keys and values;
- `rerun`, as FastMTP and speculators train: each step runs all rows at their own positions, and sees what
  that step gave for the rows before.

Everything of a token goes through its own half of `fc`, once for all steps. Embedding and head are the
target's, or the copies of them that the layer's files have.

Shape letters: B batch, T tokens, N active and M supervised rows (see `draftcore_eagle3.loss`), K steps,
H hidden, V vocabulary, A query heads, G key/value heads, D head width, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from draftcore_eagle3.attention import Keys
from draftcore_eagle3.loss import Rows
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import RMSNorm, Rotary, SwiGLU, TargetVocabulary, full_precision, rotate
from draftcore_nn.losses import cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, StepOutput
from draftcore_mtp.config import MtpConfig

if TYPE_CHECKING:
    from draftcore_mtp.options import MtpOptions

Projected = tuple[Tensor, Tensor, Tensor, Tensor]


class OffsetNorm(RMSNorm):
    """An RMSNorm whose weight is what its factor has beyond 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(exact)
        return functional.rms_norm(x.to(exact), weight.shape, weight, self.eps).to(x.dtype)


def norm_of(config: MtpConfig, width: int) -> RMSNorm:
    kind = OffsetNorm if config.kind.offset_norms else RMSNorm
    return kind(width, config.rms_norm_eps)


class Attention(nn.Module):
    """Grouped-query attention; a gate, if there is one, comes out of `q_proj` beside each head's query."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.gated = config.kind.gated
        self.q_proj = nn.Linear(hidden, queries * (1 + self.gated), bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        norm = partial(norm_of, config) if config.head_norms else nn.Identity
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)

    def project(self, x_H: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Return rotated queries [..., A, D] and keys [..., G, D], values, and the gate [..., A*D].

        Without one it has no columns.
        """
        wide, heads = self.head_dim * self.gated, (-1, self.head_dim)
        query_AD = torch.unflatten(self.q_proj(x_H), -1, (-1, self.head_dim + wide))
        query_AD, gate_AD = torch.split(query_AD, [self.head_dim, wide], -1)
        key_GD = self.k_norm(torch.unflatten(self.k_proj(x_H), -1, heads))
        value_GD = torch.unflatten(self.v_proj(x_H), -1, heads)
        query_AD, key_GD = rotate(self.q_norm(query_AD), cos, sin), rotate(key_GD, cos, sin)
        return query_AD, key_GD, value_GD, gate_AD.flatten(-2)


class DecoderLayer(nn.Module):
    """A layer of the target, in two halves: attention itself differs between training and decoding."""

    def __init__(self, config: MtpConfig, text: Any) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config, config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm_of(config, config.hidden_size)
        self.gated, kind = config.kind.gated, config.family.removesuffix("_text")
        if name := config.kind.experts:
            module = import_module(f"transformers.models.{kind}.modeling_{kind}")
            self.mlp = getattr(module, name)(copy.deepcopy(text))
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def project(self, x_H: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        return self.self_attn.project(self.input_layernorm(x_H), cos, sin)

    def finish(self, x_H: Tensor, attended_AD: Tensor, gate: Tensor) -> Tensor:
        """Add attention's output and the MLP; returns the layer's output."""
        attended = (
            attended_AD.flatten(-2) * gate.sigmoid() if self.gated else attended_AD.flatten(-2)
        )
        x_H = x_H + self.self_attn.o_proj(attended)
        normed_1NH = self.post_attention_layernorm(x_H).reshape(1, -1, x_H.shape[-1])
        output: Tensor = x_H + self.mlp(normed_1NH).view_as(x_H)  # experts insist on 3 dimensions
        return output


class Predictor(nn.Module):
    """All that the target's files hold of the layer, by Qwen's names; what is trained."""

    def __init__(self, config: MtpConfig, text: Any) -> None:
        super().__init__()
        hidden, self.kind = config.hidden_size, config.kind
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm_of(config, hidden)
        self.pre_fc_norm_hidden = norm_of(config, hidden)
        self.layers = nn.ModuleList([DecoderLayer(config, text)])
        self.norm = norm_of(config, hidden)

    def of_token(self, embedding_H: Tensor, positions: Tensor) -> Tensor:
        """Return what a token brings to the layer's input, [..., H], at rows of these positions."""
        if self.kind.hidden_first:
            embedding_H = embedding_H.masked_fill((positions == 0)[..., None], 0)
        # By a bool, torch 2.11 would not trace it.
        half_HH = self.fc.weight.chunk(2, 1)[int(self.kind.hidden_first)]
        return functional.linear(self.pre_fc_norm_embedding(embedding_H), half_HH)

    def join(self, of_token_H: Tensor, hidden_H: Tensor) -> Tensor:
        """Return the layer's input, of a token's part and the state before it."""
        half_HH = self.fc.weight.chunk(2, 1)[int(not self.kind.hidden_first)]
        return of_token_H + functional.linear(self.pre_fc_norm_hidden(hidden_H), half_HH)


class MtpDraft(TargetVocabulary):
    """The layer with its loss: `forward` is the chain over a batch.

    For the export it knows the target's `folder`, the `files` of its tensors, and the dtypes in which the
    layer's weights are `stored`.
    """

    def __init__(
        self, config: MtpConfig, options: MtpOptions, embedding_VH: Tensor, head_VH: Tensor | None,
        text: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(embedding_VH, head_VH)
        self.config, self.options = config, options
        self.folder, self.files = Path(), dict[str, str]()
        self.stored = dict[str, torch.dtype]()
        self.mtp = Predictor(config, text)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)

    # ------------------------------------------------------------ what a drafter asks for

    @property
    def layer(self) -> Any:
        return self.mtp.layers[0]

    def combine(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the target's last states, [..., H]."""
        return features["last_hidden"].to(self.compute_dtype)

    def head_and_feedback(self, output_H: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head reads and what the next step reads: both the normed output."""
        return output_H, output_H

    def lm_head(self, hidden_H: Tensor) -> Tensor:
        return hidden_H @ self.head.T

    def token_ids(self) -> None:
        """Return no mapping: the layer proposes any token of the target's."""

    # ------------------------------------------------------------ training

    def loss(self, batch: DraftBatch) -> StepOutput:
        """Return the loss of a batch, see `forward`; what depends on the mask's values is found here."""
        rows = Rows.of(host_mask(batch), self.options.steps)
        output: StepOutput = self(batch, rows.to(batch.token_ids_BT.device))
        return output

    def forward(self, batch: DraftBatch, rows: Rows) -> StepOutput:
        """Return the loss of a batch and its metrics per step k; this is what `train.compile` compiles.

        `batch.loss_mask_BT` marks rows t whose token t+2 is to be learned. The numerator is the sum over
        steps k of w_k times the sum of cross entropies with it, w_k = beta^k / sum_j beta^j; the
        denominator is how many rows step 0 has. Metrics: `accuracy_k`, `loss_k`, over the rows of step k.
        """
        steps, tokens = self.options.steps, batch.token_ids_BT.flatten()
        hidden_KMH, there_KM = self.outputs(batch, rows)
        label_M = tokens[(rows.supervised_M + 2).clamp_max(len(tokens) - 1)]
        losses = cross_entropy(hidden_KMH.flatten(0, 1), self.head, label_M.repeat(steps))
        with full_precision(tokens.device):
            loss_KM, best_KM = (torch.unflatten(x, 0, (steps, -1)) for x in losses)
            weight_KM = there_KM.to(loss_KM.dtype)
            power_K = self.options.beta ** torch.arange(
                steps, device=tokens.device, dtype=loss_KM.dtype
            )
            loss_K, count_K = (loss_KM * weight_KM).sum(-1), weight_KM.sum(-1)
            right_K = ((best_KM == label_M) * weight_KM).sum(-1)
            total = (power_K / power_K.sum() * loss_K).sum()
        sums = {"accuracy": right_K, "loss": loss_K.detach()}
        counts = {f"{n}_{k}": (x[k], count_K[k]) for n, x in sums.items() for k in range(steps)}
        return StepOutput(total, count_K[0], counts)

    def outputs(self, batch: DraftBatch, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return each step's normed output where a label is met, [K, M, H], and if there is such a row."""
        slots_KM, there_KM = rows.drafted(self.options.steps)
        if self.options.chain == "served":
            outputs = self.unroll(batch, rows)
        else:
            outputs = self.rerun(batch)
            steps_K = torch.arange(len(slots_KM), device=slots_KM.device)
            slots_KM = (rows.supervised_M - steps_K[:, None]).clamp_min(0)
        taken = [hidden.index_select(0, slots_KM[k]) for k, hidden in enumerate(outputs)]
        return torch.stack(taken), there_KM

    def inputs(self, batch: DraftBatch, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return what row t's next token brings, and the target's state of token t, [B, T, H] each."""
        next_BT = functional.pad(batch.token_ids_BT[:, 1:], (0, 1))
        of_token_BTH = self.mtp.of_token(self.embed(next_BT), positions_BT)
        return of_token_BTH, self.combine(batch.features)

    def unroll(self, batch: DraftBatch, rows: Rows) -> Iterator[Tensor]:
        """Yield each step's normed output on the active rows, [N, H], of the chain `served`."""
        mtp, layer, steps = self.mtp, self.layer, self.options.steps
        (size, length), device = batch.token_ids_BT.shape, batch.token_ids_BT.device
        cos, sin = self.rotary(torch.arange(length + steps, device=device))
        times_BT = rows.time_BT.view(size, length)
        of_token, hidden = (x.flatten(0, 1) for x in self.inputs(batch, times_BT))
        x = mtp.join(of_token, hidden)
        query, key, value, gate = layer.project(x, cos[rows.time_BT], sin[rows.time_BT])
        seen, active_N = Keys(key, value, length), rows.active_N
        time_N = rows.time_BT[active_N]
        x, query, gate = (y.index_select(0, active_N) for y in (x, query, gate))
        for step in range(steps):
            if step > 0:
                later_N = (active_N + step).clamp_max(size * length - 1)
                x = mtp.join(of_token.index_select(0, later_N), hidden)
                query, key, value, gate = layer.project(x, cos[time_N + step], sin[time_N + step])
                seen.add(key, value)
            hidden = mtp.norm(layer.finish(x, seen.attend(query, active_N), gate))
            yield hidden

    def rerun(self, batch: DraftBatch) -> Iterator[Tensor]:
        """Yield each step's normed output on all rows, [B*T, H], of the chain `rerun`."""
        times_T = torch.arange(batch.token_ids_BT.shape[1], device=batch.token_ids_BT.device)
        cos, sin = self.rotary(times_T)
        of_token, hidden = self.inputs(batch, times_T)
        for step in range(self.options.steps):
            x = self.mtp.join(functional.pad(of_token[:, step:], (0, 0, 0, step)), hidden)
            query, key, value, gate = self.layer.project(x, cos, sin)
            query, key, value = (y.transpose(1, 2) for y in (query, key, value))
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            hidden = self.mtp.norm(self.layer.finish(x, attended, gate))
            yield hidden.flatten(0, 1)
