"""Read an export as sglang and vLLM do and compute its drafts, written from their conventions alone.

It shares no code with `serving`, `model` or `drafter` (a test checks that), so a mistake of theirs
cannot hide from `draftcore verify`. It is kept plain: no cache, the whole sequence for every drafted
token, one expert after the other.

Both servers know the layer by the architecture of the whole checkpoint, and read names with a prefix of
that kind; embedding and head are the target's, or for vLLM the layer's own where the files have such. Row
t reads token t + 1 and the state of token t after the final norm, and each draft the layer's own output.
The two differ for GLM-4.5, where vLLM takes the embedding at position 0 for zero, as both do for MiMo, and
hands an output on before its norm; for MiMo, of which vLLM drafts one token; and for Qwen3.5 without its
vision part, whose layer vLLM does not look for. Experts are one group, as GLM-4.5's are. All this is read
in their sources of 2026, and not run.

Shape letters: S rows so far, H hidden, K drafts, V vocabulary, E experts, X chosen ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftcore.files import regular

SERVERS = ("sglang", "vllm")
QWEN, GLM, MIMO = "mtp.", "model.layers.{}.", "model.mtp_layers.0."
KINDS = {
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
    "Qwen3_5ForConditionalGeneration": QWEN,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
    "Glm4MoeForCausalLM": GLM,
    "MiMoForCausalLM": MIMO,
}
UNKNOWN_TO_VLLM = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# What the four parts around the layer are called, and where the layer's own names begin.
PARTS = {
    QWEN: ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    GLM: ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    MIMO: ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
}
COPIES = "embed_tokens.weight", "shared_head.head.weight"  # beside the layer, of the target's
LAYER = "layer"  # what the layer's own names begin with here


@dataclass(frozen=True)
class ServedMtp:
    """An export as `server` reads it; `config` is the text part, norms' weights are factors."""

    server: str
    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()

    @property
    def facts(self) -> Mapping[str, Any]:
        renamed = {"num_target_layers": self.config["num_hidden_layers"]}
        return {**self.config, **shared.read_rope(self.config), **renamed}

    @property
    def most(self) -> int | None:
        return 1 if (self.kind, self.server) == (MIMO, "vllm") else None

    def captured(self, host: Host) -> tuple[int, ...]:
        return ()

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Run the layer: row t reads token t + 1 and the target's last state, drafts its own output."""
        read = {name: tensor.to(at.tokens_T.device) for name, tensor in self.tensors.items()}
        embedding, state, fc, norm, _ = (f"{part}.weight" for part in PARTS[self.kind])
        eps, moe = shared.eps_of(self.config), f"{LAYER}.mlp.gate.weight" in read
        vllm_glm = (self.kind, self.server) == (GLM, "vllm")
        known_T = torch.cat([at.tokens_T[1:], at.tokens_T.new_tensor([at.last])])
        tokens_S = torch.cat([known_T, drafts_K])
        embedded_SH = read.get("embed_tokens.weight", at.host.embedding_VH)[tokens_S]
        if self.kind == MIMO or vllm_glm:
            embedded_SH = torch.cat([torch.zeros_like(embedded_SH[:1]), embedded_SH[1:]])
        embedded_SH = shared.rms_norm(embedded_SH, read[embedding], eps)
        causal_SS = torch.ones(2 * (len(tokens_S),), device=tokens_S.device).tril().bool()
        state_SH, finals = at.last_hidden_TH.float(), []
        for rows in range(len(known_T), len(tokens_S) + 1):
            parts = [embedded_SH[:rows], shared.rms_norm(state_SH, read[state], eps)]
            if self.kind == MIMO:
                parts.reverse()
            x_SH = torch.cat(parts, -1) @ read[fc].T
            normed_SH = shared.rms_norm(x_SH, read[f"{LAYER}.input_layernorm.weight"], eps)
            output_SH = shared.run_layer(
                self.server, self.config, read, LAYER, x_SH, normed_SH, normed_SH,
                causal_SS[:rows, :rows], self._experts if moe else shared.swiglu,
            )  # fmt: skip
            finals.append(shared.rms_norm(output_SH[-1], read[norm], eps))
            state_SH = torch.cat([state_SH, output_SH[-1:] if vllm_glm else finals[-1][None]])
        return torch.stack(finals) @ read.get("shared_head.head.weight", at.host.head_VH).T

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        yield from shared.common_suspects(self, host, trained)

    def _experts(self, x_SH: Tensor, read: Mapping[str, Tensor], mlp: str) -> Tensor:
        """Add up what the chosen experts give, and the one that all tokens take."""
        scores_SE, factor = x_SH @ read[f"{mlp}.gate.weight"].T, 1.0
        if self.kind == QWEN:
            shares_SE = ranks_SE = scores_SE.softmax(-1)
            output_SH = shared.swiglu(x_SH, read, f"{mlp}.shared_expert")
            output_SH *= (x_SH @ read[f"{mlp}.shared_expert_gate.weight"].T).sigmoid()
        else:
            shares_SE, factor = scores_SE.sigmoid(), self.config["routed_scaling_factor"]
            ranks_SE = shares_SE + read[f"{mlp}.gate.e_score_correction_bias"]
            output_SH = shared.swiglu(x_SH, read, f"{mlp}.shared_experts")
        best_SX = ranks_SE.topk(self.config["num_experts_per_tok"], -1).indices
        kept_SE = torch.zeros_like(shares_SE).scatter(1, best_SX, shares_SE.gather(1, best_SX))
        if self.config.get("norm_topk_prob", True):
            kept_SE = kept_SE / kept_SE.sum(-1, keepdim=True)
        for number in range(kept_SE.shape[1]):
            given = shared.swiglu(x_SH, read, f"{mlp}.experts.{number}")
            output_SH = output_SH + factor * kept_SE[:, number, None] * given
        return output_SH


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config: dict[str, Any] = json.loads(regular(folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("architectures") or []
    known = [name for name in KINDS if server == "sglang" or name not in UNKNOWN_TO_VLLM]
    kind = next((KINDS[name] for name in found if name in known), None)
    if kind is None:
        raise UnservableError(
            f"config.json says architectures: {found}, and {server} has no MTP layer of that kind\n"
            f"  it has those of {', '.join(known)}"
        )
    text: dict[str, Any] = config.get("text_config") or config
    prefix, tensors = kind.format(text["num_hidden_layers"]), dict[str, Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(regular(Path(file)), framework="pt") as stored:
                names = [name for name in {*stored.keys()} if name.startswith(prefix)]
                tensors |= {n.removeprefix(prefix): stored.get_tensor(n).float() for n in names}
        except SafetensorError as error:
            raise UnservableError(f"the tensors in {file} cannot be read: {error}") from None
    named, ignored = dict(_named(kind, tensors)), COPIES * (server == "sglang")
    ignored = tuple(name for name in ignored if named.pop(name, None) is not None)
    shared.require_tensors(named, _shapes(kind, text), f"{server} drafts with random weights")
    return ServedMtp(server, kind, text, named, ignored)


def _named(kind: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name the layer's tensors as here, each expert apart; norms that add 1 to their weight have it."""
    begin = PARTS[kind][-1]
    around = (*PARTS[kind][:-1], "embed_tokens", "shared_head.head")
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in around:
            name = f"{LAYER}.{name.removeprefix(begin)}"
        owner, _, part = name.rpartition(".")
        if not owner.endswith(".experts"):
            yield name, tensor + (kind == QWEN and tensor.ndim == 1)
            continue
        for number, expert in enumerate(tensor):
            pieces = expert.chunk(2) if part == "gate_up_proj" else (expert,)
            for piece, kept in zip(pieces, part.removesuffix("_proj").split("_"), strict=True):
                yield f"{owner}.{number}.{kept}_proj.weight", piece


def _shapes(kind: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a server fills, with the shapes that config.json gives them."""
    hidden, (heads, _, width) = config["hidden_size"], shared.head_shape(config)
    embedding, state, fc, norm, _ = PARTS[kind]
    inner = (f"{LAYER}.{name}_layernorm" for name in ("input", "post_attention"))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        (f"{name}.weight" for name in (embedding, state, norm, *inner)), (hidden,)
    )
    shapes[f"{fc}.weight"] = (hidden, 2 * hidden)
    moe = config.get("num_experts") or config.get("n_routed_experts")
    for name, shape in shared.layer_shapes(config, hidden).items():
        if not (moe and name.startswith("mlp.")):
            shapes[f"{LAYER}.{name}"] = shape
    if kind == QWEN:
        shapes[f"{LAYER}.self_attn.q_proj.weight"] = (2 * heads * width, hidden)
    if kind == QWEN or config.get("use_qk_norm"):
        shapes |= {f"{LAYER}.self_attn.{part}_norm.weight": (width,) for part in "qk"}
    return shapes
