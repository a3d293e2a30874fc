"""Read an export as sglang and vLLM do: DFlash's served backbone, and the Markov head token by token.

It is written from the servers' conventions alone, on top of draftcore-dflash's `served`, and shares
no code with `serving`, `model` or `drafter` (a test checks that). Servers build the heads by the top
level of config.json; sglang wants the Markov head's type in one of both parts. vLLM knows the plain
head only. Row 0 of a block, the last known token's own, drafts the first token.

Shape letters: S rows of a block, K drafts, H hidden, E rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import draftcore_nn.served as shared
import torch
from draftcore_dflash.served import ServedBackbone, backbone_shapes, read_backbone
from draftcore_nn.served import Round, ServedDraft, UnservableError
from torch import Tensor

SERVERS = ("sglang", "vllm")
ARCHITECTURE = "Qwen3DSparkModel"


@dataclass(frozen=True)
class ServedDSpark(ServedBackbone):
    """An export as a server reads it."""

    @property
    def most(self) -> int | None:
        return self.block_size

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Correct the logits of row k by the token before: the last known one, then the drafts."""
        read = {
            name.removeprefix("markov_head."): tensor.to(at.tokens_T.device)
            for name, tensor in self.tensors.items()
            if name.startswith("markov_head.")
        }
        rows_KH = self.block_hidden(at)[: len(drafts_K) + 1]
        logits_KV = rows_KH @ at.host.head_VH.T
        state_E = torch.zeros_like(read["markov_w1.weight"][0])
        for k, token in enumerate([at.last, *drafts_K.tolist()][: len(rows_KH)]):
            factor_E = read["markov_w1.weight"][token]
            if "gate_proj.weight" in read:
                x = torch.cat([rows_KH[k], factor_E])
                gate_E = read["gate_proj.weight"] @ x + read["gate_proj.bias"]
                factor_E = factor_E * torch.sigmoid(gate_E)
            if "joint_proj.weight" in read:
                x = torch.cat([state_E, factor_E, rows_KH[k]])
                joint_3E = read["joint_proj.weight"] @ x + read["joint_proj.bias"]
                gate_E, new_E, out_E = joint_3E.chunk(3)
                gate_E, factor_E = torch.sigmoid(gate_E), torch.tanh(out_E)
                state_E = gate_E * state_E + (1 - gate_E) * torch.tanh(new_E)
            logits_KV[k] += read["markov_w2.weight"] @ factor_E
        return logits_KV * float(self.config.get("logit_scale", 1) if self.server == "vllm" else 1)


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, tensors = read_backbone(folder, server, ARCHITECTURE)
    kind, rank = (shared.require_field(config, f"markov_{n}") for n in ("head_type", "rank"))
    if server == "vllm" and kind != "vanilla":
        raise UnservableError(
            f"markov_head_type is {kind!r}, and vLLM computes 'vanilla' only\n"
            "  serve the draft by sglang, or train one with markov_head_type: vanilla"
        )
    if config.get("sample_from_anchor", True) is not True:
        raise UnservableError(
            "sample_from_anchor is not true: a server would take row 1 of a block for the first draft\n"
            "  correct the field, or export again with draftcore"
        )
    hidden, vocab = (int(shared.require_field(config, f"{n}_size")) for n in ("hidden", "vocab"))
    heads: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
    }
    if kind == "gated":
        heads["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        heads["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        heads["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        heads["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head"):
        more = rank if config.get("confidence_head_with_markov") else 0
        heads |= {
            "confidence_head.proj.weight": (1, hidden + more),
            "confidence_head.proj.bias": (1,),
        }
    return ServedDSpark.of(server, config, tensors, backbone_shapes(config) | heads)
