"""The plugin: who names it in `plugins:` has drafts trained by Muon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftcore import hookimpl

if TYPE_CHECKING:
    from draftcore.contracts.algorithm import Draft
    from draftcore_muon.optimizer import MuonAndAdamW


@hookimpl
def optimizer(
    draft: Draft, lr: float, weight_decay: float, betas: tuple[float, float]
) -> MuonAndAdamW:
    from draftcore_muon.optimizer import MuonAndAdamW

    return MuonAndAdamW(draft, lr=lr, weight_decay=weight_decay, betas=betas)
