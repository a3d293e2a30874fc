"""Read an export as sglang and vLLM do and compute its drafts, written from their conventions alone.

It shares no code with `serving`, `model` or `drafter` (a test checks that), so a mistake of theirs
cannot hide from `draftcore verify`. It is kept plain: no cache, the whole sequence for every drafted
token.

The two servers differ: sglang reads captured layers from `eagle_config`, as outputs; vLLM reads them
from the top level, as inputs, one more. sglang ignores a tensor that nothing reads; vLLM refuses it,
and puts `model.` before the names itself. sglang caps the draft's logits where its config says
`final_logit_softcapping`, vLLM multiplies them by its `logit_scale`. Both map draft tokens by offsets,
`id = i + d2t[i]`.

Shape letters: T tokens, S rows so far, H hidden, V target and U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

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
            "rope_theta": shared.read_rope(config).get("rope_theta"),
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
        return shared.require_layers(tuple(int(layer) - first + self.shift for layer in ids), host)

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Run the draft: row t reads token t + 1 and the features of token t, drafts its own state."""
        config, eps, layer = self.config, shared.eps_of(self.config), "midlayer"
        read = {name: tensor.to(at.tokens_T.device) for name, tensor in self.tensors.items()}
        known_T = torch.cat([at.tokens_T[1:], at.tokens_T.new_tensor([at.last])])
        tokens_S = torch.cat([known_T, drafts_K])
        embedded_SH = read.get("embed_tokens.weight", at.host.embedding_VH)[tokens_S]
        embedded_SH = shared.rms_norm(embedded_SH, read[f"{layer}.input_layernorm.weight"], eps)
        parts = [part.float() for part in at.hidden]
        if _norms_layers(config):
            weights = (read[f"fc_norm.{i}.weight"] for i in range(3))
            parts = [shared.rms_norm(x, w, eps) for x, w in zip(parts, weights, strict=True)]
        hidden_SH = torch.cat(parts, -1) @ read["fc.weight"].T
        causal_SS = torch.ones(2 * (len(tokens_S),), device=tokens_S.device).tril().bool()
        finals = []
        for rows in range(len(known_T), len(tokens_S) + 1):
            normed_SH = shared.rms_norm(hidden_SH, read[f"{layer}.hidden_norm.weight"], eps)
            x = torch.cat([embedded_SH[:rows], normed_SH], -1)
            output_SH = shared.run_layer(
                self.server, config, read, layer, hidden_SH, x, x, causal_SS[:rows, :rows]
            )
            normed_SH = shared.rms_norm(output_SH, read["norm.weight"], eps)
            finals.append(normed_SH[-1])
            fed_back_SH = normed_SH if config.get("norm_output") else output_SH
            hidden_SH = torch.cat([hidden_SH, fed_back_SH[-1:]])
        logits_KU = torch.stack(finals) @ read["lm_head.weight"].T
        if self.server == "vllm":
            logits_KU = logits_KU * float(config.get("logit_scale", 1))
        elif (cap := config.get("final_logit_softcapping") or 0) > 0:
            logits_KU = cap * torch.tanh(logits_KU / cap)
        return self._over_vocabulary(logits_KU, at)

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        field = f"eagle_config.{IDS}" if self.server == "sglang" else f"the top-level {IDS}"
        kind = "outputs" if self.server == "sglang" else "inputs"
        yield from shared.shifted_layers(self, field, kind)
        if "d2t" in self.tensors:
            yield Suspect(
                "d2t holds token ids, where servers expect offsets: target id = i + d2t[i]",
                replace(self, absolute=True),
            )
        flipped = not self.config.get("norm_output")
        yield Suspect(
            f"norm_output is {not flipped}, and the draft was trained with {flipped}: it says "
            "whether the state fed back between drafts is the normed one",
            replace(self, config={**self.config, "norm_output": flipped}),
        )
        yield from shared.common_suspects(self, host, trained)

    def _over_vocabulary(self, logits_KU: Tensor, at: Round) -> Tensor:
        """Return logits over the target's tokens, [K, V], of those over the draft's."""
        if "d2t" not in self.tensors:
            return logits_KU
        d2t_U = self.tensors["d2t"].to(logits_KU.device).long()
        ids_U = d2t_U if self.absolute else d2t_U + torch.arange(len(d2t_U), device=d2t_U.device)
        lowest, highest, vocab = int(ids_U.min()), int(ids_U.max()), at.host.vocab_size
        if lowest < 0 or highest >= vocab:
            raise UnservableError(
                f"d2t maps draft tokens to ids {lowest} to {highest}, and the target has {vocab} tokens"
            )
        logits_KV = logits_KU.new_full((len(logits_KU), vocab), -torch.inf)
        return logits_KV.index_copy(1, ids_U, logits_KU)


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, stored = shared.read_folder(folder, "LlamaForCausalLMEagle3")
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
        shared.require_no_others(ignored)
    shared.require_tensors(tensors, shapes, f"{server} computes with whatever is in memory there")
    return ServedEagle3(server, config, {n: tensors[n] for n in used & tensors.keys()}, ignored)


def _known_name(name: str, server: str) -> str:
    """Name a tensor as here: the layer has two names, and sglang takes any with a prefix too."""
    name = name.removeprefix("model.") if server == "sglang" else name
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _norms_layers(config: Mapping[str, Any]) -> bool:
    """Say whether each captured layer has a norm of its own."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a server fills, with the shapes that config.json gives them."""
    hidden = int(shared.require_field(config, "hidden_size"))
    wide = int(config.get("target_hidden_size") or hidden)
    vocab = int(config.get("draft_vocab_size") or shared.require_field(config, "vocab_size"))
    layer = shared.layer_shapes(config, 2 * hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * wide),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
        **{f"midlayer.{name}.weight": (hidden,) for name in norms},
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    if _norms_layers(config):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
    if vocab != int(config["vocab_size"]):
        shapes["d2t"] = (vocab,)
    return shapes
