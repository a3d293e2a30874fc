"""Read an export as sglang and vLLM do and compute its drafts, written from their conventions alone.

It shares no code with `serving`, `model` or `drafter` (a test checks that), so a mistake of theirs
cannot hide from `draftcore verify`. It is kept plain: no cache, the whole sequence for every drafted
token.

The two servers differ: sglang reads captured layers from `eagle_config`, as outputs; vLLM reads them
from the top level, as inputs, one more. sglang ignores a tensor that nothing reads; vLLM refuses it,
and puts `model.` before the names itself. Both map draft tokens by offsets, `id = i + d2t[i]`.

Shape letters: T tokens, S rows so far, H hidden, V target and U draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftcore_tools.served import (
    attend,
    head_shape,
    read_folder,
    read_rope,
    require_field,
    require_layers,
    require_no_others,
    require_server,
    require_tensors,
    rms_norm,
    rotate,
    swiglu,
    transposed,
    with_theta,
)
from torch import Tensor

from draftcore.contracts.serving import Host, Round, Suspect, UnservableError

SERVERS = ("sglang", "vllm")
IDS = "eagle_aux_hidden_state_layer_ids"
# Fields by which a draft of this architecture is of another kind than the one computed here.
OTHER_KINDS = ("bias", "attention_bias", "mlp_bias", "norm_before_fc", "norm_before_residual",
               "parallel_drafting")  # fmt: skip


@dataclass(frozen=True)
class ServedEagle3:
    """An export as `server` reads it.

    `suspects` sets `shift` (other layer ids) and `absolute` (d2t holds ids) to try a mistake.
    """

    server: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()
    shift: int = 0
    absolute: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "vocab_size": config["vocab_size"],
            "hidden_size": config.get("target_hidden_size") or config["hidden_size"],
            "rope_theta": read_rope(config).get("rope_theta"),
            "dtype": config.get("dtype") or config.get("torch_dtype"),
        }

    @property
    def most(self) -> int | None:
        return None

    def captured(self, host: Host) -> tuple[int, ...]:
        nested = self.config.get("eagle_config") or {}
        if self.server == "sglang":
            ids, first = nested.get(IDS), 0
        else:
            ids, first = self.config.get(IDS), 1
        if ids is None:  # both servers' default, as inputs of layers
            ids, first = [2, host.num_layers // 2, host.num_layers - 3], 1
        return require_layers(tuple(int(layer) - first + self.shift for layer in ids), host)

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Run the draft: row t reads token t + 1 and the features of token t, drafts its own state."""
        read, config = self.tensors, self.config
        known_T = torch.cat([at.tokens_T[1:], at.tokens_T.new_tensor([at.last])])
        tokens_S = torch.cat([known_T, drafts_K])
        table_VH = read.get("embed_tokens.weight", at.host.embedding_VH).to(tokens_S.device)
        embedded_SH = table_VH[tokens_S]
        hidden_SH = self._joined(at.hidden)
        finals = []
        for rows in range(len(known_T), len(tokens_S) + 1):
            output_SH = self._layer(embedded_SH[:rows], hidden_SH)
            normed_SH = rms_norm(output_SH, self._on("norm.weight", at), self._eps)
            finals.append(normed_SH[-1])
            fed_back_SH = normed_SH if config.get("norm_output") else output_SH
            hidden_SH = torch.cat([hidden_SH, fed_back_SH[-1:]])
        return self._over_vocabulary(torch.stack(finals), at)

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        change, config = dataclasses.replace, self.config
        field = f"eagle_config.{IDS}" if self.server == "sglang" else f"the top-level {IDS}"
        kind = "outputs" if self.server == "sglang" else "inputs"
        for shift, amount in ((-1, "one too high"), (1, "one too low")):
            yield Suspect(
                f"the layer ids are {amount}: {self.server} takes {field} for {kind} of layers, and "
                "they are written in the other convention",
                change(self, shift=shift),
            )
        if "d2t" in self.tensors:
            yield Suspect(
                "d2t holds token ids, where servers expect offsets: target id = i + d2t[i]",
                change(self, absolute=True),
            )
        flipped = not config.get("norm_output")
        yield Suspect(
            f"norm_output is {not flipped}, and the draft was trained with {flipped}: it says "
            "whether the state fed back between drafts is the normed one",
            change(self, config={**config, "norm_output": flipped}),
        )
        theta = dict(trained.get("rope") or host.rope).get("rope_theta")
        yield Suspect(
            f"rope_theta is {read_rope(config).get('rope_theta')}, and the draft was trained with "
            f"{theta}",
            change(self, config=with_theta(config, theta)),
        )
        for name, tensors in transposed(self.tensors):
            yield Suspect(f"the tensor {name} is transposed", change(self, tensors=tensors))

    @property
    def _eps(self) -> float:
        return float(self.config.get("rms_norm_eps", 1e-6))

    def _on(self, name: str, at: Round) -> Tensor:
        return self.tensors[name].to(at.tokens_T.device)

    def _joined(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Join the captured layers through fc into [T, H]."""
        parts = [part.float() for part in hidden]
        if self.config.get("fc_norm") or self.config.get("use_aux_norm"):
            weights = [self.tensors[f"fc_norm.{i}.weight"].to(parts[0].device) for i in range(3)]
            parts = [rms_norm(x, w, self._eps) for x, w in zip(parts, weights, strict=True)]
        return torch.cat(parts, -1) @ self.tensors["fc.weight"].to(parts[0].device).T

    def _layer(self, embedded_SH: Tensor, hidden_SH: Tensor) -> Tensor:
        """Run the decoder layer on [embedding, hidden]; the hidden input is the residual."""
        device, layer = hidden_SH.device, "midlayer"
        read = {n: t.to(device) for n, t in self.tensors.items() if n.startswith(layer)}
        heads, groups, width = head_shape(self.config)
        x = torch.cat(
            [
                rms_norm(embedded_SH, read[f"{layer}.input_layernorm.weight"], self._eps),
                rms_norm(hidden_SH, read[f"{layer}.hidden_norm.weight"], self._eps),
            ],
            -1,
        )
        query, key, value = (
            torch.unflatten(x @ read[f"{layer}.self_attn.{part}_proj.weight"].T, -1, (count, width))
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        rope, positions_S = read_rope(self.config), torch.arange(len(x), device=device)
        causal_SS = positions_S[:, None] >= positions_S
        attended = attend(
            rotate(query, positions_S, rope), rotate(key, positions_S, rope), value, causal_SS
        )
        hidden_SH = hidden_SH + attended @ read[f"{layer}.self_attn.o_proj.weight"].T
        normed = rms_norm(hidden_SH, read[f"{layer}.post_attention_layernorm.weight"], self._eps)
        return hidden_SH + swiglu(normed, read, f"{layer}.mlp")

    def _over_vocabulary(self, normed_KH: Tensor, at: Round) -> Tensor:
        """Return logits over the target's tokens, [K, V]."""
        logits_KU = normed_KH @ self._on("lm_head.weight", at).T
        if "d2t" not in self.tensors:
            return logits_KU
        d2t_U = self._on("d2t", at).long()
        ids_U = d2t_U if self.absolute else d2t_U + torch.arange(len(d2t_U), device=d2t_U.device)
        if int(ids_U.min()) < 0 or int(ids_U.max()) >= at.host.vocab_size:
            raise UnservableError(
                f"d2t maps draft tokens to ids {int(ids_U.min())} to {int(ids_U.max())}, and the "
                f"target has {at.host.vocab_size} tokens"
            )
        logits_KV = logits_KU.new_full((len(logits_KU), at.host.vocab_size), -torch.inf)
        return logits_KV.index_copy(1, ids_U, logits_KU)


def read(folder: Path, server: str) -> ServedEagle3:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    require_server(server, SERVERS)
    config, stored = read_folder(folder, "LlamaForCausalLMEagle3")
    for name in OTHER_KINDS:
        if config.get(name) or (config.get("eagle_config") or {}).get(name):
            raise UnservableError(
                f"config.json says {name}: true, which this kind of draft never has"
            )
    tensors = {_known_name(name, server): tensor for name, tensor in stored.items()}
    shapes = _shapes(config)
    if "d2t" in shapes and "d2t" not in tensors:
        raise UnservableError(
            "the tensor d2t is missing, and the draft's vocabulary is not the target's: its tokens "
            "mean nothing\n  export the draft again; a tensor was dropped on the way"
        )
    used = {*shapes, "d2t", "t2d", "embed_tokens.weight"}
    ignored = tuple(sorted(tensors.keys() - used))
    if server == "vllm":
        require_no_others(ignored)
    require_tensors(tensors, shapes, f"{server} computes with whatever is in memory there")
    return ServedEagle3(server, config, {n: tensors[n] for n in used & tensors.keys()}, ignored)


def _known_name(name: str, server: str) -> str:
    """Name a tensor as here: the layer has two names, and sglang takes any with a prefix too."""
    name = name.removeprefix("model.") if server == "sglang" else name
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a server fills, with the shapes that config.json gives them."""
    hidden, inner = (int(require_field(config, f"{n}_size")) for n in ("hidden", "intermediate"))
    wide = int(config.get("target_hidden_size") or hidden)
    vocab = int(config.get("draft_vocab_size") or require_field(config, "vocab_size"))
    heads, groups, width = head_shape(config)
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * wide),
        f"{attention}.q_proj.weight": (heads * width, 2 * hidden),
        f"{attention}.k_proj.weight": (groups * width, 2 * hidden),
        f"{attention}.v_proj.weight": (groups * width, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, heads * width),
        f"{mlp}.gate_proj.weight": (inner, hidden),
        f"{mlp}.up_proj.weight": (inner, hidden),
        f"{mlp}.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
    if vocab != int(config["vocab_size"]):
        shapes["d2t"] = (vocab,)
    return shapes
