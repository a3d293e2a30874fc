"""A rendered dataset: token ids and loss masks in flat files that are mapped, not loaded.

A folder holds `tokens.bin` (int32), `mask.bin` (uint8), `offsets.bin` (int64, rows + 1),
`hashes.bin` (16 bytes a row), `skipped.jsonl` (every row left out, and why) and, written last,
`dataset.json`: a folder without it is what a killed process left, and is built anew. One process
builds at a time, under a lock that dies with it; the others wait and find the finished folder. The
folder is reused while its key (content of the source, tokenizer and template, options) is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import DataSummary
from draftcore.data.conversations import (
    BadRow,
    Conversation,
    conversations,
    open_source,
    read_conversations,
)
from draftcore.data.rendering import Renderer, RenderError
from draftcore.errors import UsageError
from draftcore.files import sync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2  # part of the key: raise it when rendering or the files change
CHUNK = 256  # rows tokenized in one call
EXAMPLES = 20  # places named per reason
HASH_BYTES = 16
FILES = ("tokens.bin", "mask.bin", "offsets.bin", "hashes.bin", "skipped.jsonl")

NO_ASSISTANT_TURN = "no assistant turn"
NO_ASSISTANT_TOKEN = "no token of an assistant"


@dataclass(frozen=True)
class DataOptions:
    """How rows become samples. Lengths are in tokens; `limit` counts rows read, bad ones too."""

    max_length: int
    last_turn_only: bool = False
    bad_rows: Literal["skip", "refuse"] = "skip"
    overlong: Literal["skip", "truncate", "refuse"] = "skip"
    limit: int | None = None


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Skipped:
    """Rows left out for one reason: how many, and the places of the first."""

    reason: str
    rows: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class DataReport:
    """What became of each row that was read; `rows` is `kept` and all `skipped` together."""

    source: str
    rows: int
    kept: int
    truncated: int
    skipped: tuple[Skipped, ...]

    def text(self) -> str:
        """A few lines for people."""
        lines = [f"{self.source}: {self.kept:,} of {self.rows:,} rows kept"]
        if self.truncated:
            lines.append(f"  {self.truncated:,} cut at the longest length")
        for entry in self.skipped:
            places = ", ".join(entry.examples[:3]) + (", ..." if entry.rows > 3 else "")
            lines.append(f"  {entry.rows:,} left out: {entry.reason} ({places})")
        return "\n".join(lines)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataReport:
        skipped = tuple(
            Skipped(s["reason"], s["rows"], tuple(s["examples"])) for s in data["skipped"]
        )
        return cls(**{**data, "skipped": skipped})


@dataclass
class _Tally:
    """Counts rows as they pass, and writes down those left out."""

    source: str
    log: TextIO | None = None
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[BadRow]] = field(default_factory=dict)

    def skip(self, bad: BadRow) -> None:
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        examples = self.examples.setdefault(bad.reason, [])
        if len(examples) < EXAMPLES:
            examples.append(bad)
        if self.log is not None:
            self.log.write(json.dumps(dataclasses.asdict(bad)) + "\n")

    def report(self) -> DataReport:
        """Return the report, most frequent reason first. Raises `UsageError` if no row was kept."""
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        skipped = tuple(
            Skipped(reason, rows, tuple(bad.where for bad in self.examples[reason]))
            for reason, rows in ordered
        )
        report = DataReport(self.source, self.rows, self.kept, self.truncated, skipped)
        if self.kept:
            return report
        if not self.rows:
            raise UsageError(f"{self.source} has no rows\n  name a file with conversations in it")
        first = [bad for examples in self.examples.values() for bad in examples][:3]
        shown = "\n".join(f"  {bad}" for bad in first)
        if set(self.counts) <= {NO_ASSISTANT_TURN, NO_ASSISTANT_TOKEN}:
            raise UsageError(
                f"no row of {self.source} has a token of an assistant: there is nothing to learn\n"
                f"{shown}\n"
                "  check that the answers have the role 'assistant' (or 'gpt'), and that the"
                " tokenizer's\n  chat template writes them, inside its {% generation %} markers if"
                " it has those"
            )
        raise UsageError(
            f"no row of {self.source} can be used\n{report.text()}\nthe first ones:\n{shown}\n"
            "  correct the rows, or the options that leave them out"
        )


# ---------------------------------------------------------------- the dataset


class Dataset:
    """Rendered rows on disk. Made by `build_dataset`; arrays are copies, so they may be changed."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "dataset.json").read_text())
        counts = {int(token): n for token, n in meta["summary"]["token_counts"].items()}
        self.folder = folder
        self.summary = DataSummary(**{**meta["summary"], "token_counts": counts})
        self.report = DataReport.from_json(meta["report"])
        self._offsets: NDArray[np.int64] = np.fromfile(folder / "offsets.bin", np.int64)
        self._tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
        self._mask = np.memmap(folder / "mask.bin", np.uint8, "r")

    def __len__(self) -> int:
        return self.summary.samples

    @property
    def fingerprint(self) -> str:
        """A hash over all rendered rows, in order."""
        return self.summary.fingerprint

    @functools.cached_property
    def feature_ids(self) -> tuple[str, ...]:
        """Per row, the name its captured features are kept under: 24 hex characters."""
        hashes = (self.folder / "hashes.bin").read_bytes()
        return tuple(
            _hash(
                self.fingerprint.encode(),
                row.to_bytes(8, "little"),
                hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES],
                size=12,
            ).hex()
            for row in range(len(self))
        )

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per row."""
        return np.diff(self._offsets)

    def tokens(self, row: int) -> NDArray[np.int64]:
        """A row's token ids, [T]."""
        return self._tokens[self._slice(row)].astype(np.int64)

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """True where the assistant produced the token, [T]."""
        return self._mask[self._slice(row)].astype(np.bool_)

    def _slice(self, row: int) -> slice:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return slice(int(self._offsets[row]), int(self._offsets[row + 1]))


def build_dataset(
    source: str,
    tokenizer: PreTrainedTokenizerFast,
    options: DataOptions,
    folder: Path,
) -> Dataset:
    """Render a source into `folder`, or reuse what is there if nothing it depends on changed.

    Raises `UsageError` for a source that cannot be read, a tokenizer that cannot render, a row that
    a `refuse` policy meets (naming file, line and reason), and when no row is left.
    """
    opened = open_source(source)
    renderer = Renderer(tokenizer, last_turn_only=options.last_turn_only)
    parts = (FORMAT, opened.key(), renderer.identity, dataclasses.asdict(options))
    key = _hash(json.dumps(parts).encode()).hex()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not _complete(folder, key):
            with _staging(folder) as staging:
                rows = conversations(opened, options.limit)
                _write(staging, source, key, rows, renderer, options)
                _publish(staging, folder)
        return Dataset(folder)


def _write(
    staging: Path,
    source: str,
    key: str,
    rows: Iterator[Conversation | BadRow],
    renderer: Renderer,
    options: DataOptions,
) -> None:
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((staging / "skipped.jsonl").open("w"))
        writer = stack.enter_context(_Writer(staging))
        tally = _Tally(source, log)
        for item in _render(rows, renderer):
            tally.rows += 1
            row = _judge(item, options)
            if isinstance(row, BadRow):
                tally.skip(row)
            else:
                tally.kept += 1
                tally.truncated += row.truncated
                writer.add(row)
        report = tally.report()
    meta = {
        "key": key,
        "fingerprint": writer.fingerprint,
        "summary": {**writer.summary(), "chat_template": renderer.template_hash},
        "report": dataclasses.asdict(report),
    }
    with (staging / "dataset.json").open("w") as file:
        json.dump(meta, file)


@dataclass(frozen=True)
class _Row:
    """A row as it is kept."""

    where: str
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    truncated: bool = False


def _render(rows: Iterator[Conversation | BadRow], renderer: Renderer) -> Iterator[_Row | BadRow]:
    """Render chunk by chunk; rows come out in the order they came in."""
    while chunk := list(itertools.islice(rows, CHUNK)):
        rendered = iter(renderer.render_many([r for r in chunk if isinstance(r, Conversation)]))
        for row in chunk:
            if isinstance(row, BadRow):
                yield row
                continue
            result = next(rendered)
            if isinstance(result, RenderError):
                yield BadRow(row.where, result.reason, result.detail)
            else:
                tokens = np.array(result.token_ids, np.int32)
                yield _Row(row.where, tokens, np.array(result.loss_mask, np.uint8))


def _judge(row: _Row | BadRow, options: DataOptions) -> _Row | BadRow:
    """Apply the policies: keep a row, cut it, leave it out, or raise `UsageError`."""
    if isinstance(row, BadRow):
        return _bad(row, options)
    if not row.mask.any():
        return _bad(BadRow(row.where, NO_ASSISTANT_TOKEN), options)
    if len(row.tokens) <= options.max_length:
        return row
    overlong = BadRow(
        row.where, f"longer than {options.max_length} tokens", f"{len(row.tokens)} tokens"
    )
    if options.overlong == "refuse":
        raise UsageError(
            f"{overlong}\n  raise data.max_length, or set data.overlong=truncate or skip"
        )
    if options.overlong == "skip":
        return overlong
    tokens, mask = row.tokens[: options.max_length], row.mask[: options.max_length]
    if not mask.any():
        reason = f"no token of an assistant in the first {options.max_length}"
        return _bad(BadRow(row.where, reason), options)
    return _Row(row.where, tokens, mask, truncated=True)


def _bad(row: BadRow, options: DataOptions) -> BadRow:
    if options.bad_rows == "refuse":
        raise UsageError(f"{row}\n  correct the row, or leave such rows out: data.bad_rows=skip")
    return row


# ---------------------------------------------------------------- files


class _Writer:
    """Appends rows to the flat files and keeps the sums of the summary."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            name: (folder / f"{name}.bin").open("wb")
            for name in ("tokens", "mask", "offsets", "hashes")
        }
        self._files["offsets"].write(np.int64(0).tobytes())
        self._digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self._counts = np.zeros(0, np.int64)
        self._rows = self._tokens = self._max_length = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, row: _Row) -> None:
        tokens, mask = row.tokens.tobytes(), row.mask.tobytes()
        row_hash = _hash(len(row.tokens).to_bytes(8, "little"), tokens, mask)
        self._digest.update(row_hash)
        self._rows += 1
        self._tokens += len(row.tokens)
        self._max_length = max(self._max_length, len(row.tokens))
        self._files["tokens"].write(tokens)
        self._files["mask"].write(mask)
        self._files["hashes"].write(row_hash)
        self._files["offsets"].write(np.int64(self._tokens).tobytes())
        learned = row.tokens[row.mask.astype(np.bool_)]
        top = int(learned.max()) + 1
        if top > len(self._counts):
            self._counts = np.pad(self._counts, (0, top - len(self._counts)))
        np.add.at(self._counts, learned, 1)

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """The fields of `DataSummary` as JSON data."""
        (used,) = self._counts.nonzero()
        return {
            "fingerprint": self.fingerprint,
            "samples": self._rows,
            "tokens": self._tokens,
            "loss_tokens": int(self._counts.sum()),
            "max_length": self._max_length,
            "token_counts": {str(token): int(self._counts[token]) for token in used},
        }


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclusive among processes; the kernel drops the lock of a process that dies."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """An empty folder to write in, gone afterwards, whatever happens."""
    staging = folder / "partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, folder: Path) -> None:
    """Move finished files into place: the old marker goes first, the new one comes last."""
    (folder / "dataset.json").unlink(missing_ok=True)
    for name in (*FILES, "dataset.json"):
        sync(staging / name)
        os.replace(staging / name, folder / name)


def _complete(folder: Path, key: str) -> bool:
    """Whether the folder holds this dataset, with files as long as they have to be."""
    try:
        meta = json.loads((folder / "dataset.json").read_text())
        rows, tokens = meta["summary"]["samples"], meta["summary"]["tokens"]
        sizes = {name: (folder / name).stat().st_size for name in FILES}
    except (OSError, ValueError, KeyError):
        return False
    expected = (4 * tokens, tokens, 8 * (rows + 1), HASH_BYTES * rows)
    return meta["key"] == key and tuple(sizes[name] for name in FILES[:4]) == expected


def _hash(*parts: bytes, size: int = HASH_BYTES) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.digest()


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """What a conversation asks of the model in its last assistant turn."""

    where: str
    token_ids: tuple[int, ...]


def read_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerFast,
    limit: int | None,
    max_prompt: int,
) -> tuple[list[Prompt], DataReport]:
    """Read prompts for evaluation from at most `limit` rows.

    A prompt over `max_prompt` tokens is left out, never cut: a cut one asks something else. Raises
    `UsageError` as `build_dataset` does, and when no prompt is left.
    """
    renderer = Renderer(tokenizer)
    tally, prompts = _Tally(source), []
    for row in read_conversations(source, limit):
        tally.rows += 1
        prompt = row if isinstance(row, BadRow) else _prompt(row, renderer, max_prompt)
        if isinstance(prompt, BadRow):
            tally.skip(prompt)
        else:
            tally.kept += 1
            prompts.append(prompt)
    return prompts, tally.report()


def _prompt(row: Conversation, renderer: Renderer, max_prompt: int) -> Prompt | BadRow:
    try:
        token_ids = renderer.prompt(row.messages, row.tools)
    except RenderError as error:
        return BadRow(row.where, error.reason, error.detail)
    if len(token_ids) > max_prompt:
        reason = f"the prompt is longer than {max_prompt} tokens"
        return BadRow(row.where, reason, f"{len(token_ids)} tokens")
    return Prompt(row.where, tuple(token_ids))
