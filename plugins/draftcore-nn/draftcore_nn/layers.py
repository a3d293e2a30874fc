"""Layers of a draft, and the target's embedding and head as a draft uses them.

Parameters bear the names that they have in the files of Llama-like models.

Shape letters: A heads, D head width, D' the rotated part of a head, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

if TYPE_CHECKING:
    from draftcore_nn.target import DecoderShape


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off: what runs inside keeps the dtypes it is given."""
    return torch.autocast(device.type, enabled=False)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, itself where it has it, as the result of an autograd function has to be.

    Where `Tensor.to` has nothing to do, torch 2.11 compiles such a function without its gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with a weight here and now: autocast's, or its own."""
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def take(x_N: Tensor, index_R: Tensor, there_R: Tensor | None = None) -> Tensor:
    """Take rows [R, ...] of [N, ...], each once: the backward takes, too, and need not add up.

    Rows that are not `there_R` may be any; they have no gradient.
    """
    return _Take.apply(x_N, index_R, there_R)  # type: ignore[no-any-return, no-untyped-call]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, index_R: Tensor, there_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(index_R if there_R is None else index_R.where(there_R, len(x_N)))
        ctx.count = len(x_N)
        return x_N.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:
        (from_R,) = ctx.saved_tensors
        rows = len(from_R)
        to_N = from_R.new_full((ctx.count + 1,), rows)
        to_N = to_N.index_copy(0, from_R, torch.arange(rows, device=from_R.device))[:-1]
        taken_N = grad_R.index_select(0, to_N.clamp_max(rows - 1))
        there_N = (to_N < rows).view(-1, *[1] * (grad_R.ndim - 1))
        return torch.where(there_N, taken_N, 0), None, None


def init_linears(module: nn.Module, std: float = 0.02) -> None:
    """Draw the weights of all linear layers from N(0, std), by torch's global generator."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)


class TargetVocabulary(nn.Module):
    """The base of a draft that reads and writes tokens by its target's embedding and head.

    `embedding_VH` and `head_VH` (None where it is the embedding) are the target's, see
    `target.target_tensors`. They are kept in their own dtype, as buffers outside the state dict:
    a `Draft` names them as `frozen=TargetVocabulary.FROZEN`.
    """

    FROZEN: ClassVar = frozenset({"embed_tokens", "target_head"})
    embed_tokens: Tensor
    target_head: Tensor | None

    def __init__(self, embedding_VH: Tensor, head_VH: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("embed_tokens", embedding_VH, persistent=False)
        self.register_buffer("target_head", head_VH, persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products here and now."""
        return compute_dtype(next(self.parameters()))

    @property
    def head(self) -> Tensor:
        """The target's LM head in the compute dtype, [V, H]."""
        head_VH = self.embed_tokens if self.target_head is None else self.target_head
        return head_VH.to(self.compute_dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [...] into [..., H], in the compute dtype."""
        return functional.embedding(tokens, self.embed_tokens).to(self.compute_dtype)


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


class Projections(nn.Module):
    """The projections of grouped-query attention over inputs [..., width], without biases.

    `heads` are the numbers of query heads and of key/value heads.
    """

    def __init__(self, shape: DecoderShape, width: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.heads = (shape.num_attention_heads, shape.num_key_value_heads)
        queries, keys = (count * shape.head_dim for count in self.heads)
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)


class SwiGLU(nn.Module):
    """The feed-forward part of a layer (arXiv 2002.05202), without biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def rotary_frequencies(
    rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Return by how much a position turns each pair of a head, [D'/2], and the scale of cosines and sines.

    Every operation stands in the order in which transformers has it, as servers do: the same bits.
    """
    kind, base = rope["rope_type"], rope["rope_theta"]
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    period = base ** (torch.arange(0, width, 2).float() / width)
    plain = 1.0 / period
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    length = rope.get("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wave = 2 * math.pi / plain
        share = (length / wave - low) / (high - low)
        between = (1 - share) * plain / factor + share * plain
        quick = torch.where(wave < length / high, plain, between)
        return torch.where(wave > length / low, plain / factor, quick), 1.0

    def pair_of(turns: float) -> float:  # the pair that turns so often within `length`
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 * (first == last)
    kept = 1 - ((torch.arange(width // 2).float() - first) / (last - first)).clamp(0, 1)
    frequency = 1.0 / (factor * period) * (1 - kept) + plain * kept
    return frequency, float(rope["attention_factor"])


class Rotary(nn.Module):
    """Rotary positions (arXiv 2104.09864); `rope` has the keys of `target.rope_of`."""

    inverse_frequency: Tensor

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        frequency, self.scale = rotary_frequencies(rope, head_dim, max_positions)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
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
