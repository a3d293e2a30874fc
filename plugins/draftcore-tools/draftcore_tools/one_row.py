"""The samples `one-row`: a run learns one row, whose token ids stand in its configuration.

What is learned is `answer`, and the token before it: EAGLE-3's published mask supervises the first round
of drafts there.
"""

from __future__ import annotations

import hashlib
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
    """The row as `contracts.run.Samples`, which has this one only."""

    def __init__(self, options: OneRowOptions) -> None:
        self._tokens = np.array(options.prompt + options.answer, dtype=np.int64)
        length = len(self._tokens)
        self._mask = np.arange(length) >= len(options.prompt) - 1
        self.lengths = np.array([length], dtype=np.int64)
        self.feature_ids = (hashlib.blake2b(self._tokens.tobytes(), digest_size=12).hexdigest(),)
        ids, counts = np.unique(self._tokens[self._mask], return_counts=True)
        learned = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        total = sum(learned.values())
        self.summary = DataSummary(self.feature_ids[0], 1, length, total, length, learned)

    def tokens(self, row: int) -> NDArray[np.int64]:
        return self._tokens

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return self._mask

    def images(self, row: int) -> tuple[Image, ...]:
        return ()


class OneRowRun:
    """The row as a run's data: trained on, held out, and asked from; see `contracts.run.RunSamples`."""

    images = None

    def __init__(self, run: OpenRun, options: OneRowOptions) -> None:
        largest, vocabulary = max(options.prompt + options.answer), run.target.vocab_size
        if largest >= vocabulary:
            raise UsageError(
                f"the row has the token {largest}, the target has {vocabulary} tokens\n"
                "  give token ids of this target: data.prompt, data.answer"
            )
        self.options, self.train, self.eval = options, "one row", "one row"
        self.longest = len(options.prompt + options.answer)

    def samples(self, part: str, date: str = "", limit: int = 0) -> OneRow:
        return OneRow(self.options)

    def prompts(self, limit: int = 0) -> Prompts:
        return Prompts([list(self.options.prompt)], {"data": self.train})
