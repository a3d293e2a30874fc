"""Read an export as sglang and vLLM do: DFlash's served backbone, convolutions, the selector's walk.

It is written from the servers' conventions alone, on top of draftcore-dflash's `served`, and shares no
code with `serving`, `model` or `drafter` (a test checks that). Both servers take the K best tokens of each
row by their logits and score them given the token chosen before; no other token is drafted. They want the
sizes of convolutions and of the selector in `dflash_config`.

Shape letters: T tokens of context, S rows of a block, Z = T + S, H hidden, J taps, N groups, D drafts, K
candidates, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_dflash.served import ServedBackbone, backbone_shapes, read_backbone
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

SERVERS = ("sglang", "vllm")
ARCHITECTURE = "DFlash2DraftModel"
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
PREDECESSOR, SUCCESSOR, HIDDEN = (
    f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
)


@dataclass(frozen=True)
class ServedDFlash2(ServedBackbone):
    """An export as a server reads it."""

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Return scores of the candidates of each row, given the draft before it; -inf elsewhere."""
        read = {name: tensor.to(at.tokens_T.device) for name, tensor in self.tensors.items()}
        hidden_DH = self.block_hidden(at)[1 : len(drafts_K) + 2]
        unary_DV = (hidden_DH @ at.host.head_VH.T) * float(self.field("output_multiplier") or 1)
        if cap := self.field("final_logit_softcapping"):
            unary_DV = float(cap) * torch.tanh(unary_DV / float(cap))
        scores_DV = torch.full_like(unary_DV, -math.inf)
        for row, token in enumerate([at.last, *drafts_K.tolist()][: len(hidden_DH)]):
            ids_K = unary_DV[row].argsort(descending=True)[: int(self.field("selector_top_k"))]
            wanted_E = read[PREDECESSOR][token] * (read[HIDDEN] @ hidden_DH[row])
            scores_DV[row, ids_K] = unary_DV[row, ids_K] + read[SUCCESSOR][ids_K] @ wanted_E
        return scores_DV

    def run_layer(
        self, read: Mapping[str, Tensor], layer: str, hidden_SH: Tensor, context_TH: Tensor,
        sees_SZ: Tensor,
    ) -> Tensor:  # fmt: skip
        """Convolve what attention and MLP read and return; the context is read as it is."""
        eps = shared.eps_of(self.config)

        def attention(x_SH: Tensor) -> Tensor:
            x_ZH, name = torch.cat([context_TH, x_SH]), f"{layer}.self_attn"
            return shared.run_attention(self.server, self.config, read, name, x_SH, x_ZH, sees_SZ)

        def mlp(x_SH: Tensor) -> Tensor:
            return shared.swiglu(x_SH, read, f"{layer}.mlp")

        sublayers: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
            ("input_layernorm", "attention_conv", attention),
            ("post_attention_layernorm", "mlp_conv", mlp),
        )
        for norm, conv, sublayer in sublayers:
            x_SH = shared.rms_norm(hidden_SH, read[f"{layer}.{norm}.weight"], eps)
            base_2JH = read[f"{layer}.{conv}.base_kernel"]
            flat_SX = x_SH @ read[f"{layer}.{conv}.kernel_projection.weight"].T
            change_S2JN = flat_SX.view(len(x_SH), 2, base_2JH.shape[1], -1)
            inner_SH = sublayer(_convolve(x_SH, base_2JH[0], change_S2JN[:, 0]))
            hidden_SH = hidden_SH + _convolve(inner_SH, base_2JH[1], change_S2JN[:, 1])
        return hidden_SH

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        yield from super().suspects(host, trained)
        if (value := trained.get("selector_top_k")) is not None:
            yield Suspect(
                f"selector_top_k is {self.field('selector_top_k')}, and the draft was trained with "
                f"{value}",
                self.nesting(selector_top_k=value),
            )
        exchanged = {PREDECESSOR: self.tensors[SUCCESSOR], SUCCESSOR: self.tensors[PREDECESSOR]}
        yield Suspect(
            "the selector's two codebooks are exchanged",
            replace(self, tensors={**self.tensors, **exchanged}),
        )


def _convolve(x_SH: Tensor, base_JH: Tensor, change_SJN: Tensor) -> Tensor:
    """Add to each row's own tap those of the rows before it, of which the first has none."""
    taps_SJH = base_JH + change_SJN.repeat_interleave(x_SH.shape[1] // change_SJN.shape[2], 2)
    sum_SH = torch.zeros_like(x_SH)
    for row in range(len(x_SH)):
        for j in range(min(row + 1, len(base_JH))):
            sum_SH[row] += taps_SJH[row, j] * x_SH[row - j]
    return sum_SH


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, tensors = read_backbone(folder, server, ARCHITECTURE)
    nested = config.get("dflash_config") or {}
    taps, group, rank, best = (int(shared.require_field(nested, name)) for name in SIZES)
    hidden, vocab = (int(shared.require_field(config, f"{n}_size")) for n in ("hidden", "vocab"))
    if group < 1 or hidden % group or not 0 < best <= vocab:
        raise UnservableError(
            f"conv_group_size is {group}, of a draft of width {hidden}, and selector_top_k {best}, of "
            f"{vocab} tokens: servers want a divisor of the one, and no more than the other"
        )
    layer: dict[str, tuple[int, ...]] = {
        "base_kernel": (2, taps, hidden),
        "kernel_projection.weight": (2 * taps * (hidden // group), hidden),
    }
    more = {
        f"layers.{index}.{conv}.{name}": shape
        for index in range(int(shared.require_field(config, "num_hidden_layers")))
        for conv in ("attention_conv", "mlp_conv")
        for name, shape in layer.items()
    }
    more |= {PREDECESSOR: (vocab, rank), SUCCESSOR: (vocab, rank), HIDDEN: (rank, hidden)}
    return ServedDFlash2.of(server, config, tensors, backbone_shapes(config) | more)
