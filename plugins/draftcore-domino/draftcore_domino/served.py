"""Read an export as sglang does: DFlash's served backbone, and the causal head token by token.

It is written from the server's conventions alone, on top of draftcore-dflash's `served`, and shares
no code with `serving`, `model` or `drafter` (a test checks that). sglang is the only server that
knows the head, and it refuses a head that is not complete.

Shape letters: S rows of a block, K drafts, H hidden, G GRU state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_dflash.served import ServedBackbone, backbone_shapes, read_backbone
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

SERVERS = ("sglang",)
FIELDS = ("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim")


@dataclass(frozen=True)
class ServedDomino(ServedBackbone):
    """An export as sglang reads it."""

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Take proposal 0 from the base logits alone; add a low-rank correction from 1 on."""
        read = {name: tensor.to(at.tokens_T.device) for name, tensor in self.tensors.items()}
        first = 0 if self.field("shift_label") else 1
        rows_KH = self.block_hidden(at)[first : first + len(drafts_K) + 1]
        base_KV = rows_KH @ at.host.head_VH.T
        state_G = base_KV.new_zeros(int(self.field("gru_hidden_dim")))
        for k, token in enumerate([at.last, *drafts_K.tolist()]):
            state_G = _gru(at.host.embedding_VH[token], state_G, read)
            if k > 0:
                low_E = read["embed_proj.0.weight"] @ torch.cat([rows_KH[k], state_G])
                base_KV[k] += read["embed_proj.2.weight"] @ torch.nn.functional.silu(low_E)
        return base_KV

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        yield from super().suspects(host, trained)
        shifted = not self.field("shift_label")
        yield Suspect(
            f"shift_label is {not shifted}, and the draft was trained with {shifted}: it says "
            "whether a row predicts the token after its own position",
            self.nesting(shift_label=shifted),
        )


def _gru(x_H: Tensor, state_G: Tensor, read: Mapping[str, Tensor]) -> Tensor:
    """Run one step of a GRU without biases; its gates are stacked reset, update, new."""
    reset_x, update_x, new_x = (read["prefix_gru.weight_ih_l0"] @ x_H).chunk(3)
    reset_h, update_h, new_h = (read["prefix_gru.weight_hh_l0"] @ state_G).chunk(3)
    reset, update = torch.sigmoid(reset_x + reset_h), torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + reset * new_h)
    return (1 - update) * new + update * state_G


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, tensors = read_backbone(folder, server)
    nested = config.get("dflash_config") or {}
    if nested.get("projector_type") != "domino":
        raise UnservableError(
            f"dflash_config.projector_type is {nested.get('projector_type')!r}, and sglang knows this "
            "head as 'domino' only\n  correct the name, or export again with draftcore"
        )
    given = {name: shared.require_field({**config, **nested}, name) for name in FIELDS}
    if given["pure_draft_prefix_len"] != 1 or not isinstance(given["shift_label"], bool):
        raise UnservableError(
            "sglang serves pure_draft_prefix_len 1 and a shift_label of true or false; config.json "
            f"has {given['pure_draft_prefix_len']!r} and {given['shift_label']!r}"
        )
    if config.get("emb_dim") not in (None, given["emb_dim"]):
        raise UnservableError(
            f"emb_dim is {config['emb_dim']} at the top level and {given['emb_dim']} in "
            "dflash_config: sglang refuses the draft"
        )
    states, rank = int(given["gru_hidden_dim"]), int(given["emb_dim"])
    hidden = int(shared.require_field(config, "hidden_size"))
    head = {
        "prefix_gru.weight_ih_l0": (3 * states, hidden),
        "prefix_gru.weight_hh_l0": (3 * states, states),
        "embed_proj.0.weight": (rank, hidden + states),
        "embed_proj.2.weight": (int(config["vocab_size"]), rank),
    }
    shared.require_tensors(tensors, head, "sglang refuses the draft")
    return ServedDomino.of(server, config, tensors, backbone_shapes(config) | head)
