"""Read an export as sglang and vLLM do and compute its drafts, written from their conventions alone.

It shares no code with `serving`, `model` or `drafter` (a test checks that), so a mistake of theirs
cannot hide from `draftcore verify`. It is kept plain: no cache, the whole sequence for every drafted
token.

The two servers differ: sglang reads captured layers from `eagle_config`, as outputs; vLLM reads them
from the top level, as inputs, one more. sglang ignores a tensor that nothing reads; vLLM refuses it,
and puts `model.` before the names itself. Of layers after the first sglang calls the norm before attention
`hidden_norm`, vLLM `input_layernorm`; either has both, and reads one. sglang caps the draft's logits where
its config says `final_logit_softcapping`, vLLM multiplies them by its `logit_scale`. Both map draft tokens
by offsets, `id = i + d2t[i]`.

Shape letters: T tokens, S rows so far, H hidden, V target and U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

SERVERS, ARCHITECTURE = ("sglang", "vllm"), "LlamaForCausalLMEagle3"
NORM = {"sglang": "hidden_norm", "vllm": "input_layernorm"}  # before attention, of further layers
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
        read = self.tensors_at(at)
        known_T = torch.cat([at.tokens_T[1:], at.tokens_T.new_tensor([at.last])])
        tokens_S = torch.cat([known_T, drafts_K])
        hidden_SH = self.combine(read, [part.float() for part in at.hidden])
        finals = []
        for rows in range(len(known_T), len(tokens_S) + 1):
            output_SH = self.run(read, at, tokens_S[:rows], hidden_SH)
            normed_SH = shared.rms_norm(output_SH, read["norm.weight"], shared.eps_of(self.config))
            finals.append(normed_SH[-1])
            fed_back_SH = normed_SH if self.config.get("norm_output") else output_SH
            hidden_SH = torch.cat([hidden_SH, fed_back_SH[-1:]])
        return self.over_vocabulary(torch.stack(finals) @ read["lm_head.weight"].T, at)

    def tensors_at(self, at: Round) -> dict[str, Tensor]:
        """Return the tensors where the round's tokens lie."""
        return {name: tensor.to(at.tokens_T.device) for name, tensor in self.tensors.items()}

    def combine(self, read: Mapping[str, Tensor], parts: Sequence[Tensor]) -> Tensor:
        """Return hidden inputs [..., H] of the captured layers' states, [..., H] each."""
        if _norms_layers(self.config):
            eps, weights = (
                shared.eps_of(self.config),
                (read[f"fc_norm.{i}.weight"] for i in range(3)),
            )
            parts = [shared.rms_norm(x, w, eps) for x, w in zip(parts, weights, strict=True)]
        return torch.cat([*parts], -1) @ read["fc.weight"].T

    def run(
        self, read: Mapping[str, Tensor], at: Round, tokens_S: Tensor, hidden_SH: Tensor
    ) -> Tensor:
        """Return the last layer's output, [S, H], of rows that see those up to their own."""
        config, eps = self.config, shared.eps_of(self.config)
        sees_SS = torch.ones(2 * (len(tokens_S),), device=tokens_S.device).tril().bool()
        x = read.get("embed_tokens.weight", at.host.embedding_VH)[tokens_S]
        x = shared.rms_norm(x, read["midlayer.input_layernorm.weight"], eps)
        normed = shared.rms_norm(hidden_SH, read["midlayer.hidden_norm.weight"], eps)
        x = torch.cat([x, normed], -1)
        hidden_SH = shared.run_layer(
            self.server, config, read, "midlayer", hidden_SH, x, x, sees_SS
        )
        for layer in _further_layers(config):
            x = shared.rms_norm(hidden_SH, read[f"{layer}.{NORM[self.server]}.weight"], eps)
            hidden_SH = shared.run_layer(self.server, config, read, layer, hidden_SH, x, x, sees_SS)
        return hidden_SH

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

    def over_vocabulary(self, logits_KU: Tensor, at: Round) -> Tensor:
        """Return logits over the target's tokens, [K, V], of those over the draft's."""
        config = self.config
        if self.server == "vllm":
            logits_KU = logits_KU * float(config.get("logit_scale", 1))
        elif (cap := config.get("final_logit_softcapping") or 0) > 0:
            logits_KU = cap * torch.tanh(logits_KU / cap)
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
    config, tensors = shared.read_folder(folder, ARCHITECTURE)
    return ServedEagle3(server, config, *named(config, tensors, server, OTHER_KINDS))


def named(
    config: Mapping[str, Any], stored: Mapping[str, Tensor], server: str, others: Iterable[str]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors that a server reads, as named here, and the names of those that it leaves unread.

    Raises UnservableError for what it would refuse, and for a field of `others` that is set.
    """
    for name in others:
        if config.get(name) or (config.get("eagle_config") or {}).get(name):
            raise UnservableError(
                f"config.json says {name}: true, which this kind of draft never has"
            )
    tensors = {_known_name(name, server): tensor for name, tensor in stored.items()}
    shapes = _shapes(config, server)
    if "d2t" in shapes and "d2t" not in tensors:
        raise UnservableError(
            "the tensor d2t is missing, and the draft's vocabulary is not the target's: its tokens "
            "mean nothing\n  export the draft again; a tensor was dropped on the way"
        )
    also = {f"{layer}.{norm}.weight" for layer in _further_layers(config) for norm in NORM.values()}
    used = {*shapes, *also, "d2t", "t2d", "embed_tokens.weight"}
    ignored = tuple(sorted(tensors.keys() - used))
    if server == "vllm":
        shared.require_no_others(ignored)
    shared.require_tensors(tensors, shapes, f"{server} computes with whatever is in memory there")
    return {name: tensors[name] for name in used & tensors.keys()}, ignored


def _known_name(name: str, server: str) -> str:
    """Name a tensor as here: the layer has two names, and sglang takes any with a prefix too."""
    name = name.removeprefix("model.") if server == "sglang" else name
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _norms_layers(config: Mapping[str, Any]) -> bool:
    """Say whether each captured layer has a norm of its own."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def _further_layers(config: Mapping[str, Any]) -> list[str]:
    """Name the layers after the first."""
    return [f"layers.{i}" for i in range(1, int(config.get("num_hidden_layers") or 1))]


def _shapes(config: Mapping[str, Any], server: str) -> dict[str, tuple[int, ...]]:
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
    layer = shared.layer_shapes(config, hidden)
    for further in _further_layers(config):
        shapes |= {f"{further}.{name}": shape for name, shape in layer.items()}
        shapes |= {f"{further}.{n}.weight": (hidden,) for n in (NORM[server], norms[-1])}
    if _norms_layers(config):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)}
    if vocab != int(config["vocab_size"]):
        shapes["d2t"] = (vocab,)
    return shapes
