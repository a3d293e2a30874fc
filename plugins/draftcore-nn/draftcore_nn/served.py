"""What algorithms share that read an export as a server does, and what compares such a reading.

The hook `read_export` returns a `ServedDraft`: the draft implemented a second time, in the plainest
way and from the server's conventions alone, so that no mistake of training and export is repeated in
it. Here are, in this order, that protocol and its records, the comparison with a trained draft
(`proposals`, `leads`, `gaps`), what checks the folder that is read, and the small parts that every
transformer has (norm, rotary positions, attention). Neither training nor export uses this module, and
it uses none that they do.

Layer ids are 0-based outputs, as everywhere: output k is `hidden_states[k + 1]` of transformers.

Shape letters: T tokens, S rows, H hidden, K drafted tokens, V vocabulary, A query heads, G key/value
heads, D head width, F rotary frequencies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.files import regular

FLOOR = 1e-6  # probabilities below it are not told apart
Shapes = Mapping[str, tuple[int, ...]]


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
    """An export read by one server's conventions: one sequence, no cache, fp32, a whole forward a question.

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
        """Return the layers whose outputs the server would feed, in order. Raises UnservableError."""

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Logits [K + 1, V] of the proposals 0..K, those before K being these drafts.

        Tokens that the draft cannot propose have -inf. Raises UnservableError.
        """

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterable[Suspect]:
        """Return what may be wrong where this draft is not the trained one, most frequent first.

        `trained` is `Draft.config` of that one.
        """


@dataclass(frozen=True)
class Suspect:
    """A possible mistake: if `draft`, the export with it undone, matches, then `cause` is the reason."""

    cause: str
    draft: ServedDraft


# ---------------------------------------------------------------- the comparison


def proposals(draft: ServedDraft, at: Round, count: int) -> Tensor:
    """Draft `count` tokens greedily, [K]."""
    drafts_K = torch.zeros(0, dtype=torch.long, device=at.tokens_T.device)
    for _ in range(count):
        best = draft.logits(at, drafts_K)[-1].argmax()
        drafts_K = torch.cat([drafts_K, best[None]])
    return drafts_K


def leads(draft: ServedDraft, at: Round, drafts_K: Tensor) -> Tensor:
    """Return by how much the served draft prefers its own greedy choice to each draft, [K] in nats.

    It is 0 where the two are the same.
    """
    logits_KV = draft.logits(at, drafts_K[:-1])
    return logits_KV.amax(-1) - logits_KV.gather(-1, drafts_K[:, None])[:, 0]


def gaps(draft: ServedDraft, at: Round, drafts_K: Tensor, probs_KV: Tensor) -> Tensor:
    """Return how far log-probabilities are apart at most, over all tokens, [K] in nats.

    `probs_KV` are the distributions that `drafts_K` were drawn from; the served draft's own are those
    after the same drafts. Probabilities below FLOOR count as FLOOR.
    """
    theirs_KV = draft.logits(at, drafts_K[:-1]).softmax(-1)
    return (theirs_KV.clamp_min(FLOOR).log() - probs_KV.clamp_min(FLOOR).log()).abs().amax(-1)


# ---------------------------------------------------------------- reading a folder


def require_server(server: str, known: Iterable[str]) -> None:
    """Raise UsageError for a server whose conventions a reader does not know."""
    if server not in (names := list(known)):
        raise UsageError(
            f"no conventions of a server {server!r} are known{nearest(server, names)}\n"
            f"  this draft can be read as: {', '.join(names)}"
        )


def read_folder(folder: Path, architecture: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json's content and all tensors in fp32 (integers as they are).

    Raises UsageError where there is no export, UnservableError for one of another architecture.
    """
    file, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not file.is_file() or not weights:
        lacking = "config.json" if not file.is_file() else "*.safetensors"
        raise UsageError(f"{folder} holds no {lacking}\n  give a folder that `export` wrote")
    config: dict[str, Any] = json.loads(regular(file).read_text(encoding="utf-8"))
    found = config.get("architectures") or []
    if architecture not in found:
        raise UnservableError(
            f"config.json says architectures: {found}, and servers know this kind of draft as "
            f"{architecture!r} only\n  correct the name, or export again with draftcore"
        )
    read_rope(config)  # raises where its two spellings differ
    try:
        tensors = {name: t for part in weights for name, t in load_file(regular(part)).items()}
    except SafetensorError as error:
        raise UnservableError(f"the tensors in {folder} cannot be read: {error}") from None
    return config, {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def require_field(config: Mapping[str, Any], name: str) -> Any:
    """Return a field that a server cannot do without; raises UnservableError."""
    if config.get(name) is None:
        raise UnservableError(
            f"config.json has no {name}\n  add the field, or export the draft again"
        )
    return config[name]


def head_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of query and key/value heads, and their width."""
    heads = int(require_field(config, "num_attention_heads"))
    width = config.get("head_dim") or require_field(config, "hidden_size") // heads
    return heads, int(config.get("num_key_value_heads") or heads), int(width)


def require_layers(layers: tuple[int, ...], host: Host) -> tuple[int, ...]:
    """Return the layers, by their outputs; raises UnservableError where one cannot be captured."""
    if not all(0 <= layer < host.num_layers - 1 for layer in layers):
        raise UnservableError(
            f"the captured layers are the outputs {list(layers)}; of a target of "
            f"{host.num_layers} layers the outputs 0 to {host.num_layers - 2} can be captured"
        )
    return layers


def require_tensors(tensors: Mapping[str, Tensor], shapes: Shapes, missing: str) -> None:
    """Raise UnservableError for the first tensor that is missing or not of its shape.

    `missing` says what the server does without a tensor.
    """
    for name, shape in shapes.items():
        if name not in tensors:
            raise UnservableError(
                f"the tensor {name} {list(shape)} is missing: {missing}\n"
                "  export the draft again; a tensor was dropped on the way"
            )
        found = tuple(tensors[name].shape)
        if found == shape:
            continue
        cause = "config.json describes another shape"
        if found == shape[::-1]:
            cause = "it is transposed: rows and columns are exchanged"
        raise UnservableError(
            f"the tensor {name} is {list(found)}, servers expect {list(shape)}\n  cause: {cause}"
        )


def require_no_others(names: Iterable[str]) -> None:
    """Raise UnservableError for tensors that the server has no parameter for."""
    if shown := ", ".join(sorted(names)[:4]):
        raise UnservableError(
            f"the server has no place for: {shown}\n"
            "  names are bare, without `model.`, and a draft has no tensors but its own: export again"
        )


def layer_shapes(config: Mapping[str, Any], wide: int) -> dict[str, tuple[int, ...]]:
    """Return the matrices of a layer whose attention reads states of this width, with their shapes."""
    hidden, inner = (int(require_field(config, f"{n}_size")) for n in ("hidden", "intermediate"))
    heads, groups, width = head_shape(config)
    return {
        "self_attn.q_proj.weight": (heads * width, wide),
        "self_attn.k_proj.weight": (groups * width, wide),
        "self_attn.v_proj.weight": (groups * width, wide),
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def transposed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each square matrix's name, and the tensors with it transposed: no shape shows that."""
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1] > 1:
            yield name, {**tensors, name: tensor.T}


def shifted_layers(draft: Any, field: str, kind: str) -> Iterator[Suspect]:
    """Yield the mistake of a field of layer ids, which the server takes for outputs or for inputs.

    `draft` is a dataclass whose `shift` is added to the ids.
    """
    for shift, amount in ((-1, "one too high"), (1, "one too low")):
        yield Suspect(
            f"the layer ids are {amount}: {draft.server} takes {field} for {kind} of layers, and they "
            "are written in the other convention",
            replace(draft, shift=shift),
        )


def common_suspects(draft: Any, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
    """Yield the mistakes of any transformer; `draft` is a dataclass with `config` and `tensors`."""
    theta = dict(trained.get("rope") or host.rope).get("rope_theta")
    yield Suspect(
        f"rope_theta is {read_rope(draft.config).get('rope_theta')}, and the draft was trained with "
        f"{theta}",
        replace(draft, config=with_theta(draft.config, theta)),
    )
    for name, tensors in transposed(draft.tensors):
        yield Suspect(f"the tensor {name} is transposed", replace(draft, tensors=tensors))


# ---------------------------------------------------------------- what every transformer has


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_H


def eps_of(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps", 1e-6))


def swiglu(x: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Run the MLP whose three weights begin with `prefix`."""
    gate, up, down = (tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def run_layer(
    server: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str,
    residual_SH: Tensor, query_SX: Tensor, key_TX: Tensor, sees_ST: Tensor,
    mlp: Callable[[Tensor, Mapping[str, Tensor], str], Tensor] = swiglu,
) -> Tensor:  # fmt: skip
    """Run a layer's attention and its MLP on a residual, see `run_attention`."""
    eps = eps_of(config)
    residual_SH = residual_SH + run_attention(
        server, config, tensors, f"{prefix}.self_attn", query_SX, key_TX, sees_ST
    )
    x_SH = rms_norm(residual_SH, tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
    return residual_SH + mlp(x_SH, tensors, f"{prefix}.mlp")


def run_attention(
    server: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str,
    query_SX: Tensor, key_TX: Tensor, sees_ST: Tensor,
) -> Tensor:  # fmt: skip
    """Run attention from what queries read over what keys and values do; returns [S, H].

    Queries stand at the last of the keys' positions. Heads of queries and keys are normed where the
    tensors that begin with `prefix` have norms for them; projections have biases where these have them;
    attention is gated where a head's query is twice as wide, by its second half.
    """
    rope, eps = served_rope(config, server), eps_of(config)
    heads, groups, width = head_shape(config)
    positions_T = torch.arange(len(key_TX), device=key_TX.device)
    query, key, value = (
        torch.unflatten(
            x @ tensors[f"{prefix}.{part}_proj.weight"].T
            + tensors.get(f"{prefix}.{part}_proj.bias", 0),
            -1, (count, -1),
        )
        for part, x, count in (("q", query_SX, heads), ("k", key_TX, groups), ("v", key_TX, groups))
    )  # fmt: skip
    query, gate = query[..., :width], query[..., width:].flatten(1)
    if f"{prefix}.q_norm.weight" in tensors:
        query = rms_norm(query, tensors[f"{prefix}.q_norm.weight"], eps)
        key = rms_norm(key, tensors[f"{prefix}.k_norm.weight"], eps)
    query = rotate(query, positions_T[-len(query) :], rope)
    attended_SX = attend(query, rotate(key, positions_T, rope), value, sees_ST)
    attended_SX = attended_SX * gate.sigmoid() if gate.numel() else attended_SX
    return attended_SX @ tensors[f"{prefix}.o_proj.weight"].T


def attend(query_SAD: Tensor, key_TGD: Tensor, value_TGD: Tensor, sees_ST: Tensor) -> Tensor:
    """Run grouped-query attention under a mask, scaled by D^-0.5; returns [S, A * D]."""
    shared = query_SAD.shape[1] // key_TGD.shape[1]
    key_TAD, value_TAD = (x.repeat_interleave(shared, 1) for x in (key_TGD, value_TGD))
    scores_AST = torch.einsum("sad,tad->ast", query_SAD, key_TAD) * query_SAD.shape[-1] ** -0.5
    weights_AST = scores_AST.masked_fill(~sees_ST, -math.inf).softmax(-1)
    return torch.einsum("ast,tad->sad", weights_AST, value_TAD).flatten(1)


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE of a config.json, which has two spellings; raises UnservableError where they differ.

    Servers on transformers 5 read `rope_parameters`, those before it `rope_theta` and
    `rope_scaling`: an export that says two things means another draft to each.
    """
    new = dict(config.get("rope_parameters") or {})
    old = {**(config.get("rope_scaling") or {})}
    old |= {n: config[n] for n in ("rope_theta", "partial_rotary_factor") if config.get(n)}
    if not new:
        return old
    for name in sorted(new.keys() & old.keys()):
        if new[name] != old[name]:
            raise UnservableError(
                f"config.json has two values of {name}: {new[name]} in rope_parameters, {old[name]} "
                "in the older spelling (rope_theta, rope_scaling)\n"
                "  servers on transformers 5 read the first, others the second: make the two agree"
            )
    return {**old, **new}


def served_rope(config: Mapping[str, Any], server: str) -> dict[str, Any]:
    """Return the RoPE with the scale of YaRN's cosines and sines, as `attention_factor`.

    It follows from `factor`, and from the two `mscale` where both are given. sglang multiplies that
    by `attn_factor` and does not know `attention_factor`; in vLLM the latter takes its place, and the
    former is unknown.
    """
    rope = read_rope(config)
    if (rope.get("rope_type") or rope.get("type")) != "yarn" or "factor" not in rope:
        return rope
    factor = float(rope["factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    names = ("mscale", "mscale_all_dim")
    weights = [float(rope[name]) for name in names if rope.get(name) is not None]
    own = scale(weights[0]) / scale(weights[1]) if len(weights) == 2 else scale(1)
    if server == "sglang":
        return rope | {"attention_factor": own * float(rope.get("attn_factor", 1))}
    return rope | {"attention_factor": rope.get("attention_factor") or own}


def with_theta(config: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """Return the config with another RoPE base, in one spelling."""
    spellings = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    rope = {**read_rope(config), "rope_theta": theta}
    return {n: v for n, v in config.items() if n not in spellings} | {"rope_parameters": rope}


def rotate(x_SAD: Tensor, positions_S: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Turn the first part of each head by its position; pairs are (i, i + half)."""
    head = x_SAD.shape[-1]
    width = int(rope.get("rope_dim") or head * float(rope.get("partial_rotary_factor") or 1))
    frequency, scale = _frequencies(width, rope)
    angle_S1F = (positions_S[:, None].double() * frequency.to(positions_S.device))[:, None]
    cos, sin = (angle_S1F.cos() * scale).float(), (angle_S1F.sin() * scale).float()
    half = width // 2
    left, right = x_SAD[..., :half], x_SAD[..., half:width]
    turned = [left * cos - right * sin, right * cos + left * sin, x_SAD[..., width:]]
    return torch.cat(turned, -1)


def _frequencies(width: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return radians per position, [F], and the factor of cosines and sines."""
    theta = float(rope.get("rope_theta") or 10000.0)
    base = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scalings: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "default": lambda: (base, 1.0),
        "linear": lambda: (base / float(rope["factor"]), 1.0),
        "llama3": lambda: (_llama3(base, rope), 1.0),
        "yarn": lambda: _yarn(base, width, theta, rope),
    }
    if kind not in scalings:
        raise UnservableError(f"config.json has RoPE type {kind!r}\n  known: {', '.join(scalings)}")
    try:
        return scalings[kind]()
    except KeyError as error:
        raise UnservableError(f"config.json has no {error} for RoPE type {kind!r}") from None


def _llama3(base: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Slow long waves down, leave short ones, blend those between."""
    turns = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return base / float(rope["factor"]) * (1 - blend) + base * blend


def _yarn(base: Tensor, width: int, theta: float, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Do as llama3, but blend linearly in the dimension; attention is sharpened too, see `served_rope`."""
    factor, length = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension(float(rope.get(f"beta_{n}") or d)) for n, d in (("fast", 32), ("slow", 1))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = (torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    slow = slow.clamp(0, 1)
    return base / factor * slow + base * (1 - slow), float(rope["attention_factor"])
