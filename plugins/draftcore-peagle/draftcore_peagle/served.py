"""Read an export as vLLM does: EAGLE-3's served draft, and mask rows behind the known ones.

It is written from vLLM's conventions alone, on top of draftcore-eagle3's `served`, and shares no code with
`serving`, `model` or `drafter` (a test checks that). vLLM is the only server that drafts in parallel.

Shape letters: K drafts before the last, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draftcore_nn.served as shared
import torch
from draftcore_eagle3.served import ARCHITECTURE, OTHER_KINDS, ServedEagle3, named
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

SERVERS = ("vllm",)
PARALLEL = "parallel_drafting"
MASK = "mask_token_id", "pard_token", "ptd_token_id"  # the first that there is


@dataclass(frozen=True)
class ServedPEagle(ServedEagle3):
    """An export as vLLM reads it."""

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**super().facts, "mask_token_id": mask_of(self.config)}

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Run the known rows, and a mask row for each draft but the first, whatever the drafts are."""
        read, masks = self.tensors_at(at), len(drafts_K)
        last = [at.last, *[mask_of(self.config)] * masks]
        tokens_S = torch.cat([at.tokens_T[1:], at.tokens_T.new_tensor(last)])
        known_TH = self.combine(read, [part.float() for part in at.hidden])
        masked_H = self.combine(read, [*read["mask_hidden"].flatten().chunk(len(at.hidden))])
        hidden_SH = torch.cat([known_TH, masked_H.expand(masks, -1)])
        output_KH = self.run(read, at, tokens_S, hidden_SH)[len(known_TH) - 1 :]
        normed_KH = shared.rms_norm(output_KH, read["norm.weight"], shared.eps_of(self.config))
        return self.over_vocabulary(normed_KH @ read["lm_head.weight"].T, at)

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        mask = trained.get("mask_token_id")
        yield Suspect(
            f"mask token is {mask_of(self.config)}, and the draft was trained with {mask}",
            replace(self, config={**self.config, MASK[0]: mask}),
        )
        yield from super().suspects(host, trained)


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, stored = shared.read_folder(folder, ARCHITECTURE)
    if not config.get(PARALLEL):
        raise UnservableError(
            f"config.json does not say {PARALLEL}: true, and vLLM would draft one token after the other"
        )
    hidden = int(shared.require_field(config, "hidden_size"))
    wide = 3 * int(config.get("target_hidden_size") or hidden)
    embedding = (int(shared.require_field(config, "vocab_size")), hidden)
    needed = {"mask_hidden": (1, 1, wide), "embed_tokens.weight": embedding}
    shared.require_tensors(stored, needed, "vLLM refuses the draft, or embeds as the target does")
    mask_of(config)
    others = [name for name in OTHER_KINDS if name != PARALLEL]
    rest = {name: tensor for name, tensor in stored.items() if name != "mask_hidden"}
    tensors, ignored = named(config, rest, server, others)
    return ServedPEagle(server, config, {**tensors, "mask_hidden": stored["mask_hidden"]}, ignored)


def mask_of(config: Mapping[str, Any]) -> int:
    """Return the mask token's id; raises UnservableError where there is none."""
    found = (config[name] for name in MASK if config.get(name) is not None)
    if (mask := next(found, None)) is None:
        raise UnservableError(
            f"config.json has none of {', '.join(MASK)}, and vLLM refuses the draft"
        )
    return int(mask)
