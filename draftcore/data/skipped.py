"""Rows that a run leaves out because they cannot be captured or read, and how many may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from draftcore.errors import DraftcoreError

logger = logging.getLogger(__name__)


class Skipped(dict[int, str]):
    """The skipped rows of the dataset with the reasons; kept in checkpoints, so that a resume repeats them.

    `share` of `rows` may be skipped, and one row always.
    """

    def __init__(self, reasons: Mapping[int, str], *, rows: int, share: float) -> None:
        super().__init__(reasons)
        self.most = max(1, int(share * rows))

    def add(self, reasons: Mapping[int, str]) -> None:
        """Skip rows. Raises DraftcoreError where they are more than may be, or none."""
        if not reasons:
            raise DraftcoreError("a capture refused rows of a batch and named none of them")
        for row in sorted(reasons.keys() - self.keys()):
            logger.warning("row %s is skipped: %s", row, reasons[row])
        self.update(reasons)
        if len(self) > self.most:
            first = "\n".join(f"  row {row}: {reason}" for row, reason in list(self.items())[:8])
            problem = f"{len(self)} rows cannot be trained on, and {self.most} may be skipped"
            remedy = "mend the cause, leave the rows out of the data, or raise data.max_skipped"
            raise DraftcoreError(f"{problem}\n{first}\n  {remedy}")
