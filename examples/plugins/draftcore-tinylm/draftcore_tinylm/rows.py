"""Rows that are token ids already: JSON lines of `input_ids` and `loss_mask`.

What a row asks is all that stands before the first token that is learned.

Shape letters: T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import Image
from draftcore.contracts.run import Prompts
from draftcore.errors import UsageError
from draftcore_tinylm.options import RowsOptions


class Rows:
    """The rows of a file, in memory."""

    def __init__(self, rows: list[tuple[NDArray[np.int64], NDArray[np.bool_]]]) -> None:
        self.rows = rows
        digests = [digest(ids_T.tobytes() + mask_T.tobytes()) for ids_T, mask_T in rows]
        fingerprint = digest("".join(digests).encode())
        self.feature_ids = tuple(
            digest(f"{fingerprint} {row} {content}".encode()) for row, content in enumerate(digests)
        )
        self.lengths = np.array([len(ids_T) for ids_T, _ in rows], dtype=np.int64)
        learned = Counter(int(token) for ids_T, mask_T in rows for token in ids_T[mask_T])
        self.summary = DataSummary(
            fingerprint=fingerprint,
            samples=len(rows),
            tokens=int(self.lengths.sum()),
            loss_tokens=learned.total(),
            max_length=int(self.lengths.max()),
            token_counts=dict(sorted(learned.items())),
        )

    def tokens(self, row: int) -> NDArray[np.int64]:
        return self.rows[row][0]

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return self.rows[row][1]

    def images(self, row: int) -> tuple[Image, ...]:
        return ()


class TokenRows:
    """All rows of a run; see `draftcore.contracts.run.RunSamples`."""

    images: Any = None  # rows have none

    def __init__(self, options: RowsOptions, vocab_size: int) -> None:
        self.train, self.eval, self.longest = options.train, options.eval, options.max_length
        self.vocab_size = vocab_size

    def samples(self, part: Literal["train", "eval"], date: str = "", limit: int = 0) -> Rows:
        if (file := self.train if part == "train" else self.eval) is None:
            raise UsageError(f"data.{part} is not set\n  set it to a file of JSON lines")
        return Rows(self.read(Path(file))[: limit or None])

    def prompts(self, limit: int = 0) -> Prompts:
        """Return what held-out rows ask; the answers are the target's to find."""
        rows = self.samples("eval", limit=limit)
        asked = [ids_T[: int(mask_T.argmax())].tolist() for ids_T, mask_T in rows.rows]
        about = {"data": self.eval, "data_digest": rows.summary.fingerprint}
        return Prompts(asked, about)

    def read(self, file: Path) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Read a file; raises UsageError that names the first line which is no row."""
        rows = []
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                ids_T = np.array(data["input_ids"], dtype=np.int64)
                mask_T = np.array(data["loss_mask"], dtype=np.bool_)
                if not 2 <= len(ids_T) == len(mask_T) <= self.longest:
                    lengths = f"{len(ids_T)} input_ids and {len(mask_T)} loss_mask"
                    raise ValueError(f"{lengths}, of 2 to {self.longest} each")
                if ids_T.min() < 0 or ids_T.max() >= self.vocab_size:
                    raise ValueError(f"a token that is none of the target's {self.vocab_size}")
                if mask_T[0] or not mask_T.any():
                    raise ValueError("no token that is learned, or none before it")
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(
                    f"{file}:{number}: {error}\n"
                    '  a row is {"input_ids": [5, 9, 2], "loss_mask": [0, 1, 1]}'
                ) from None
            rows.append((ids_T, mask_T))
        if not rows:
            raise UsageError(f"{file} has no rows")
        return rows


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
