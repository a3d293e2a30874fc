"""Muon for the hidden matrices of a draft and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftcore.contracts.algorithm import Draft
from draftcore.errors import UsageError


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the matrices that take states to states: neither embeddings nor heads over tokens."""
    return {
        weight
        for part_name, part in module.named_modules()
        if not isinstance(part, nn.Embedding) and "head" not in part_name
        for weight in part.parameters(recurse=False)
        if weight.ndim == 2
    }


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers whose groups and state are its own, so that a checkpoint has them all.

    Muon's updates are scaled to the size of AdamW's, and so take its learning rate and weight decay.
    """

    def __init__(
        self, draft: Draft, *, lr: float, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        muon, adam = list[dict[str, Any]](), list[dict[str, Any]]()
        hidden = hidden_matrices(draft.module)
        for group in draft.parameter_groups:
            if any(hasattr(weight, "placements") for weight in group["params"]):
                raise UsageError(
                    "muon needs each matrix whole, and train.shard cuts them into parts\n"
                    "  leave out train.shard, or muon"
                )
            for groups, inside in ((muon, True), (adam, False)):
                chosen = [weight for weight in group["params"] if (weight in hidden) is inside]
                groups.extend([{**group, "params": chosen}] * bool(chosen))
        self.parts = list[torch.optim.Optimizer]()
        tuning: Any = {"lr": lr, "weight_decay": weight_decay}
        if muon:
            self.parts.append(torch.optim.Muon(muon, **tuning, adjust_lr_fn="match_rms_adamw"))
        if adam:
            fused = all(weight.is_cuda for group in adam for weight in group["params"])
            self.parts.append(torch.optim.AdamW(adam, **tuning, betas=betas, fused=fused))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
