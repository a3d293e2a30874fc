"""The shape of a DSpark draft: the backbone's and the heads'."""

from __future__ import annotations

from dataclasses import dataclass

from draftcore_dflash.config import DraftConfig


@dataclass(frozen=True)
class DSparkConfig(DraftConfig):
    """A DFlash draft's shape, and that of the heads. Row k of a block predicts the token after it."""

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
