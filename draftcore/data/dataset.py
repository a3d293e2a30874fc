"""A rendered dataset: token ids and loss masks in one flat file that is mapped, not loaded.

A folder holds `rows.bin` (a `TOKEN` for each token, row after row) and, written last,
`dataset.json`: lengths, ids and summary of the rows, and the report with every row left out, and
why. One process builds at a time, under a lock that dies with it; the others wait and find what it
built, which is reused while its key (content of the source, tokenizer and template, options) is the
same and its file is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftcore.config import DataConfig
from draftcore.data.conversations import BadRow, RowError, open_source, read_conversations
from draftcore.data.rendering import Rendered, Renderer
from draftcore.data.samples import StoredSamples
from draftcore.errors import UsageError
from draftcore.files import sync, write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 3  # part of the key: raise it when rendering or the files change
TOKEN = np.dtype([("id", "<i4"), ("learned", "?")])


@dataclass
class DataReport:
    """What became of each row that was read: how many are kept, and all that are left out."""

    source: str
    kept: int = 0
    truncated: int = 0
    skipped: list[BadRow] = field(default_factory=list)

    def text(self) -> str:
        """Return a few lines for people, with the most frequent reason first."""
        rows = self.kept + len(self.skipped)
        lines = [f"{self.source}: {self.kept:,} of {rows:,} rows kept"]
        if self.truncated:
            lines.append(f"  {self.truncated:,} cut at the longest length")
        for reason, count in Counter(bad.reason for bad in self.skipped).most_common():
            places = [bad.where for bad in self.skipped if bad.reason == reason]
            named = ", ".join(places[:3]) + (", ..." if count > 3 else "")
            lines.append(f"  {count:,} left out: {reason} ({named})")
        return "\n".join(lines)

    def require_rows(self) -> None:
        """Raise UsageError if no row was kept."""
        if self.kept:
            return
        first = "".join(f"  {bad}\n" for bad in self.skipped[:3])
        raise UsageError(
            f"no row of {self.source} can be used\n{self.text()}\nthe first ones:\n{first}"
            "  name a file with conversations, or correct its rows or the options that leave them out;\n"
            "  where no answer is found: its role is 'assistant' or 'gpt', and the chat template writes\n"
            "  it, inside its {% generation %} markers if it has those"
        )


class Dataset(StoredSamples):
    """Rendered rows on disk. Made by `build_dataset`; arrays are copies, so they may be changed."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "dataset.json").read_text())
        super().__init__(meta)
        self.key, self.fingerprint = meta["key"], self.summary.fingerprint
        skipped = [BadRow(*bad) for bad in meta["report"]["skipped"]]
        self.report = DataReport(**{**meta["report"], "skipped": skipped})
        # Raises ValueError for a file that is shorter.
        self._rows = np.memmap(folder / "rows.bin", TOKEN, "r", shape=(self.summary.tokens,))
        self._ends = np.cumsum(self.lengths)

    def tokens(self, row: int) -> NDArray[np.int64]:
        """A row's token ids, [T]."""
        return self._row(row)["id"].astype(np.int64)

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """True where the assistant produced the token, [T]."""
        return self._row(row)["learned"].astype(np.bool_)

    def _row(self, row: int) -> NDArray[Any]:
        end = int(self._ends[row])
        return self._rows[end - int(self.lengths[row]) : end]


def build_dataset(
    source: str, tokenizer: PreTrainedTokenizerFast, options: DataConfig, folder: Path
) -> Dataset:
    """Render a source into `folder`, or reuse what is there if nothing it depends on changed.

    Raises `UsageError` for a source that cannot be read, a tokenizer that cannot render, a row that
    a `refuse` policy meets (naming file, line and reason), and when no row is left.
    """
    opened = open_source(source)
    renderer = Renderer(tokenizer, last_turn_only=options.last_turn_only)
    policies = options.model_dump_json(exclude={"train", "eval", "max_skipped"})
    parts = (str(FORMAT), opened.key(), renderer.identity, policies)
    key = _hash("\0".join(parts).encode()).hex()
    folder.mkdir(parents=True, exist_ok=True)
    marker, rows, partial = (folder / name for name in ("dataset.json", "rows.bin", "rows.partial"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, KeyError):
            if (found := Dataset(folder)).key == key:
                return found
        report = DataReport(source)
        kept = _keep(renderer.render(opened.rows(options.limit)), options, report)
        samples = _write(partial, kept, renderer.template_hash)
        report.require_rows()
        meta = {"key": key, **samples, "report": vars(report)}
        marker.unlink(missing_ok=True)
        partial.replace(rows)
        write_atomic(marker, json.dumps(meta))
        return Dataset(folder)


def _keep(
    rows: Iterable[Rendered | BadRow], options: DataConfig, report: DataReport
) -> Iterator[Rendered]:
    """Apply the policies: keep a row, cut it, leave it out, or raise `UsageError`."""
    longest = options.max_length
    for row in rows:
        policy, remedy = options.bad_rows, "correct it, or leave such rows out: data.bad_rows=skip"
        if isinstance(row, Rendered):
            where, length, answered = row.where, len(row.token_ids), row.loss_mask.any()
            if answered and length > longest and options.overlong != "truncate":
                policy = options.overlong
                remedy = "raise data.max_length, or set data.overlong=truncate or skip"
                row = BadRow(where, f"longer than {longest} tokens", f"{length} tokens")
            elif row.loss_mask[:longest].any():
                report.kept += 1
                report.truncated += length > longest
                yield Rendered(where, row.token_ids[:longest], row.loss_mask[:longest])
                continue
            else:
                among = f" in the first {longest}" if answered else ""
                row = BadRow(where, f"no token of an assistant{among}")
        if policy == "refuse":
            raise UsageError(f"{row}\n  {remedy}")
        report.skipped.append(row)


def _write(file: Path, rows: Iterable[Rendered], chat_template: str) -> dict[str, Any]:
    """Write the rows' tokens, and return what `StoredSamples` reads of them."""
    lengths: list[int] = []
    hashes: list[bytes] = []
    counts: Counter[int] = Counter()
    with file.open("wb") as opened:
        for row in rows:
            tokens = np.empty(len(row.token_ids), TOKEN)
            tokens["id"], tokens["learned"] = row.token_ids, row.loss_mask
            opened.write(tokens.tobytes())
            lengths.append(len(tokens))
            data = (row.token_ids.tobytes(), row.loss_mask.tobytes())
            hashes.append(_hash(len(tokens).to_bytes(8, "little"), *data))
            counts.update(row.token_ids[row.loss_mask].tolist())
    sync(file)
    fingerprint = _hash(*hashes).hex()
    ids = [
        _hash(fingerprint.encode(), at.to_bytes(8, "little"), one, size=12).hex()
        for at, one in enumerate(hashes)
    ]
    summary = {
        "fingerprint": fingerprint,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "loss_tokens": counts.total(),
        "max_length": max(lengths, default=0),
        "token_counts": sorted(counts.items()),
        "chat_template": chat_template,
    }
    return {"feature_ids": ids, "lengths": lengths, "summary": summary}


def _hash(*parts: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=size).digest()


def read_prompts(
    source: str, tokenizer: PreTrainedTokenizerFast, limit: int | None, max_prompt: int
) -> list[list[int]]:
    """Read what at most `limit` conversations ask of the model in their last assistant turn.

    A prompt over `max_prompt` tokens is left out, never cut: a cut one asks something else. What is
    left out is told on stderr. Raises
    `UsageError` as `build_dataset` does, and when no prompt is left.
    """
    renderer, report, prompts = Renderer(tokenizer), DataReport(source), list[list[int]]()
    for row in read_conversations(source, limit):
        if not isinstance(row, BadRow):
            try:
                token_ids = renderer.prompt(row.messages, row.tools)
                if len(token_ids) <= max_prompt:
                    prompts.append(token_ids)
                    continue
                reason = f"the prompt is longer than {max_prompt} tokens"
                row = BadRow(row.where, reason, f"{len(token_ids)} tokens")
            except RowError as error:
                row = BadRow(row.where, *error.args)
        report.skipped.append(row)
    report.kept = len(prompts)
    report.require_rows()
    if report.skipped:
        print(report.text(), file=sys.stderr)
    return prompts
