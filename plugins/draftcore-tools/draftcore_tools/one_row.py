"""The samples `one-row`: a run learns one row, whose token ids stand in its configuration.

What is learned is `answer`, and the token before it: EAGLE-3's published mask supervises the first round
of drafts there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import Image
from draftcore.contracts.run import OpenRun, Prompts
from draftcore.errors import UsageError

Tokens = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class OneRowOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Tokens = Field(description="token ids")
    answer: Tokens = Field(description="token ids to learn")


class OneRow:
    """One row: what a run trains on, is held out, and is asked; see `contracts.run.RunSamples`."""

    def __init__(self, run: OpenRun, options: OneRowOptions) -> None:
        self.prompt, self._tokens = list(options.prompt), np.array(options.prompt + options.answer)
        if (largest := int(self._tokens.max())) >= run.target.vocab_size:
            raise UsageError(
                f"the row has the token {largest}, the target {run.target.vocab_size} tokens\n"
                "  give token ids of this target: data.prompt, data.answer"
            )
        self.train = self.eval = "one row"
        self.longest = len(self._tokens)
        self.lengths = np.array([self.longest], dtype=np.int64)
        fingerprint = hashlib.blake2b(self._tokens.tobytes(), digest_size=12).hexdigest()
        self.feature_ids: Sequence[str] = (fingerprint,)
        ids, counts = np.unique(self._tokens[self.loss_mask(0)], return_counts=True)
        learned = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        sizes = self.longest, sum(learned.values()), self.longest
        self.summary = DataSummary(fingerprint, 1, *sizes, learned)

    def samples(self, part: str, date: str = "", limit: int = 0) -> OneRow:
        return self

    def prompts(self, limit: int = 0) -> Prompts:
        return Prompts([self.prompt], {"data": self.train})

    def tokens(self, row: int) -> NDArray[np.int64]:
        return self._tokens

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.arange(self.longest) >= len(self.prompt) - 1

    def images(self, row: int) -> tuple[Image, ...]:
        return ()
