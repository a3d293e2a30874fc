"""What decodes, as the runner of the phase `decode` returns it: rounds of drafting and verifying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.contracts.algorithm import Drafter
    from draftcore.contracts.target import TargetModel

Prompts: TypeAlias = Sequence[Sequence[int]]


class Rows(Protocol):
    """Rows that are being decoded, one round at a time; `last_B` is the token each goes on from.

    `span` bounds the positions that a round or step reads, as in `TargetModel.forward`.
    """

    last_B: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""

    def propose(self) -> None:
        """Draft the tokens of a round."""

    def verify(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read the drafts with the target; return tokens_BT, counts_B and room_B.

        The first counts_B tokens of a row are new: accepted drafts, then one of the target's own.
        room_B says how many drafts could be accepted.
        """

    def plain(self, span: int) -> None:
        """Take a step without a draft, to be timed. The rows are of no other use afterwards."""


class DecodeRunner(Protocol):
    """Runs rounds of drafting and verifying."""

    target: TargetModel
    drafter: Drafter

    def reserve(self, rows: int, max_len: int) -> None:
        """Expect batches of at most so many rows and positions."""

    def start(self, prompts: Prompts, max_len: int, temperature: float, seed: int) -> Rows:
        """Read prompts and choose the first token of each."""
