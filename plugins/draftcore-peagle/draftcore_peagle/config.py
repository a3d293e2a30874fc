"""The shape of a P-EAGLE draft: EAGLE-3's, and the token that stands for one to be drafted."""

from __future__ import annotations

from dataclasses import dataclass

from draftcore_eagle3.config import DraftConfig

from draftcore.errors import UsageError


@dataclass(frozen=True)
class PEagleConfig(DraftConfig):
    """An EAGLE-3 draft's shape; a mask token is always there."""

    mask_token_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"mask_token_id {self.mask_token_id} has no row in an embedding of "
                f"{self.vocab_size} tokens\n"
                f"  set mask_token_id to an id from 0 to {self.vocab_size - 1}"
            )
