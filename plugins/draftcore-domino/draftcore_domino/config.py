"""The shape of a Domino draft: the backbone's and the head's."""

from __future__ import annotations

from dataclasses import dataclass

from draftcore_dflash.config import DraftConfig


@dataclass(frozen=True)
class DominoConfig(DraftConfig):
    """A DFlash draft's shape, and the causal head's. Servers know `pure_draft_prefix_len` 1 only."""

    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    shift_label: bool = True
    pure_draft_prefix_len: int = 1

    @property
    def first_row(self) -> int:
        """The first row of a block that predicts anything."""
        return 0 if self.shift_label else 1

    @property
    def first_corrected_row(self) -> int:
        return self.first_row + self.pure_draft_prefix_len
