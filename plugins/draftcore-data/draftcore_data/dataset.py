"""A rendered dataset: token ids and loss masks in one flat file that is mapped, not loaded.

A folder holds `rows.bin` (a `TOKEN` for each token, row after row) and, written last and sealed,
`dataset.json`: the digest of `rows.bin`, lengths, ids and summary of the rows, and the report with
every row left out, and why. One process builds at a time, under a lock that dies with it; the others
wait and find what it built, which is reused while its key (content of the source, tokenizer and
template, options) is the same and both files are as they were written. The date that a template was
given is kept and given again, so that tomorrow's rows are today's. A row's id is a digest of its content,
its images' too, compared whenever it is read; rows are rendered anew when a file of an image has changed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import Image, ImageProcessor, RowError
from draftcore.contracts.run import Prompts
from draftcore.errors import DraftcoreError, UsageError, printable
from draftcore.files import digest, no_link, read_sealed, sync, write_sealed
from draftcore_data.conversations import (
    IMAGE_UNREAD,
    NO_PROCESSOR,
    NOT_JSON,
    NOT_UTF8,
    ROLES,
    UNKNOWN_ROLE,
    UNKNOWN_SHAPE,
    BadRow,
    Rendered,
)
from draftcore_data.files import TO_UTF8, open_files
from draftcore_data.options import DataOptions, Sources
from draftcore_data.parallel import render_all, report_progress
from draftcore_data.rendering import FORMAT, Renderer
from draftcore_data.sources import Find, named, open_source, read_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TOKEN = np.dtype([("id", "<i4"), ("learned", "?")])
LONGER = "longer than"  # begins the reason of a row that is left out for its length
NO_ANSWER = "no token of an assistant"  # begins that of a row without any
# What to do where most of the rows that are left out are so for this reason, or for one that begins so.
REMEDIES = {
    UNKNOWN_SHAPE: "a row has messages, conversations, prompt and completion, instruction and output, or\n"
    "  input_ids and loss_mask; where they have other names, say which:\n"
    "  data.columns={prompt: question, completion: answer}",
    UNKNOWN_ROLE: f"known are {', '.join(ROLES)}",
    "no assistant turn": "questions alone teach nothing: have the target answer them, and learn from that:\n"
    "  draftcore data regenerate RUN.yaml --out own.jsonl --endpoint URL\n"
    "  or say which key the answers have: data.columns={completion: response}",
    NO_ANSWER: "the chat template has to write answers, inside its {% generation %} markers if it has those",
    NOT_JSON: "a file holds lines of JSON, or JSON; tables end in .csv, .tsv, .parquet or .arrow",
    NOT_UTF8: TO_UTF8,
}
CACHED_ROWS = 256  # that were checked: a row's tokens are asked for shortly before its mask is


@dataclass
class DataReport:
    """What became of each row that was read: how many are kept, and all that are left out."""

    source: str
    kept: int = 0
    truncated: int = 0
    skipped: list[BadRow] = field(default_factory=list)
    overlong: list[int] = field(default_factory=list)  # lengths of the rows above the longest
    notes: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)  # rows by the keys that are not read

    def text(self, details: bool = False) -> str:
        """Return a few lines for people, with the most frequent reason first."""
        rows = self.kept + len(self.skipped)
        lines = [f"{self.source}: {self.kept:,} of {rows:,} rows kept"]
        if self.truncated:
            lines.append(f"  {self.truncated:,} cut at the longest length")
        lines += [f"  {note.format(count)}" for note, count in self.notes.items()]
        if self.unread:
            keys = ", ".join(f"{key} ({n:,} rows)" for key, n in sorted(self.unread.items()))
            lines.append(f"  keys that are not read: {keys}")
        for reason, count in Counter(bad.reason for bad in self.skipped).most_common():
            bad = [bad for bad in self.skipped if bad.reason == reason]
            named = ", ".join(one.where for one in bad[:3]) + (", ..." if count > 3 else "")
            detail = f": {bad[0].detail}" if details and bad[0].detail else ""
            lines.append(f"  {count:,} left out: {reason}{detail} ({named})")
        return printable("\n".join(lines))

    def require_rows(self, share: float | str = "skip") -> None:
        """Raise UsageError if no row was kept, or more than a share cannot be used; one always may."""
        if not (self.kept or self.skipped):
            raise UsageError(
                f"{self.source} is empty: it has no row\n  name a file with conversations"
            )
        unusable = [row for row in self.skipped if not row.reason.startswith(LONGER)]
        rows = self.kept + len(unusable)
        too_many = isinstance(share, float) and len(unusable) > max(1, share * rows)
        if self.kept and not too_many:
            return
        told, otherwise = self.text(details=True), ""
        if self.kept:
            bad = f"{len(unusable)} of {rows} rows cannot be used"
            told = f"{bad}, more than data.bad_rows={share:g} allows\n{told}"
            otherwise = "\n  or leave them out all the same: data.bad_rows=skip"
        else:
            _, _, reasons = told.partition("\n")
            told = f"no row of {self.source} can be used\n{reasons}"
        most, _ = Counter(bad.reason for bad in unusable or self.skipped).most_common(1)[0]
        remedies = [text for reason, text in REMEDIES.items() if most.startswith(reason)]
        remedy = (remedies or ["correct the rows, or the options that leave them out"])[0]
        raise UsageError(f"{told}\n  {remedy}{otherwise}")


class Dataset:
    """Rendered rows on disk. Made by `build_dataset`; arrays are copies, so they may be changed.

    Raises ValueError for a file that was altered since, OSError for one that is not there.
    """

    def __init__(self, folder: Path) -> None:
        meta, self.file = read_sealed(folder / "dataset.json"), folder / "rows.bin"
        if digest(self.file) != meta["rows"]:
            raise ValueError("the digest of rows.bin is not what it says")
        self.feature_ids: tuple[str, ...] = tuple(meta["feature_ids"])
        self.lengths: NDArray[np.int64] = np.array(meta["lengths"], dtype=np.int64)
        self.summary = DataSummary.from_json(meta["summary"])
        self.key, self.fingerprint = meta["key"], self.summary.fingerprint
        report, skipped = meta["report"], [BadRow(*bad) for bad in meta["report"]["skipped"]]
        counts = {key: Counter(report[key]) for key in ("notes", "unread")}
        self.report = DataReport(**{**report, "skipped": skipped, **counts})
        self.all_images = {
            int(row): tuple(Image(*fields) for fields in images) for row, images in meta["images"]
        }
        self.images_key = str(meta["images_key"])
        self._tokens = np.memmap(self.file, TOKEN, "r", shape=(self.summary.tokens,))
        self._ends = np.cumsum(self.lengths)
        self._row = functools.lru_cache(maxsize=CACHED_ROWS)(self._read_row)

    def tokens(self, row: int) -> NDArray[np.int64]:
        """Return a row's token ids, [T]."""
        return self._row(row)["id"].astype(np.int64)

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        """Return where the assistant produced the token, [T]."""
        return self._row(row)["learned"].astype(np.bool_)

    def images(self, row: int) -> tuple[Image, ...]:
        """Return a row's images, in their order."""
        return self.all_images.get(row, ())

    def largest(self) -> int:
        """Return the largest token id of all rows."""
        return int(self._tokens["id"].max())

    def answered(self, prompts: Sequence[Sequence[int]]) -> int:
        """Count the prompts, different ones, that a row answers."""
        wanted = {np.array(prompt, "<i4").tobytes() for prompt in prompts}
        lengths, found = {len(prompt) for prompt in prompts}, set[bytes]()
        for end, length in zip(self._ends, self.lengths, strict=True):
            row = self._tokens[end - length : end]
            starts = np.flatnonzero(row["learned"][1:] & ~row["learned"][:-1]) + 1
            for start in lengths.intersection(starts.tolist()):
                found |= wanted & {row["id"][:start].tobytes()}
        return len(found)

    def _read_row(self, row: int) -> NDArray[Any]:
        """Copy a row out of the file, and raise DraftcoreError if it is not what was written there."""
        end = int(self._ends[row])
        tokens = np.array(self._tokens[end - int(self.lengths[row]) : end])
        content = _content(tokens, self.images(row))
        if _feature_id(self.fingerprint, row, content) != self.feature_ids[row]:
            raise DraftcoreError(
                f"row {row} in {self.file} was altered while it was in use\n"
                "  start the same command again: the file is rendered anew"
            )
        return tokens


def build_dataset(
    sources: Sources,
    tokenizer: PreTrainedTokenizerFast,
    options: DataOptions,
    folder: Path,
    *,
    find: Find = open_files,
    date: str = "",
    processor: ImageProcessor | None = None,
    positions: int | None = None,
) -> Dataset:
    """Render sources into `folder`, or reuse what is there if nothing it depends on changed.

    A template that asks for the date gets `date`; without one, that of the rows which are there.
    `processor` is for rows with images, which are left out without it. The target has so many
    `positions`, or no bound.
    Raises `UsageError` for a source that cannot be read, a tokenizer that cannot render, a row that
    a `refuse` policy meets (naming file, line and reason), and when no row is left.
    """
    source, options = open_source(sources, find), bounded(options, positions)
    folder.mkdir(parents=True, exist_ok=True)
    marker, rows, partial = (folder / name for name in ("dataset.json", "rows.bin", "rows.partial"))
    with open(folder / "lock", "a", opener=no_link) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        renderer = Renderer(tokenizer, options, date or date_of(folder), processor)
        settings = options.model_dump_json(exclude={"train", "eval", "chat_template"})
        parts = (str(FORMAT), source.key(), renderer.identity, settings, repr(processor))
        key = _hash("\0".join(parts).encode()).hex()
        try:
            old = Dataset(folder)
            images = images_key(old.all_images, old.report, processor)
            if (old.key, old.summary.date, old.images_key) == (key, renderer.date, images):
                return old
        except (ValueError, KeyError, OSError) as error:
            if marker.exists():
                logger.warning("%s is not what was written there: %s; rendered anew", marker, error)
        report = DataReport(named(sources))
        rows_read = itertools.islice(source.rows(), options.limit)
        rendered = render_all(renderer, rows_read, options.columns, report.unread)
        kept = _keep(report_progress(rendered), options, report, positions)
        samples = _write(partial, kept, renderer)
        report.require_rows(options.bad_rows)
        meta = {"key": key, "rows": digest(partial), **samples, "report": vars(report)}
        meta["images_key"] = images_key(dict(samples["images"]), report, processor)
        marker.unlink(missing_ok=True)
        partial.replace(rows)
        write_sealed(marker, meta)
        return Dataset(folder)


def date_of(folder: Path) -> str:
    """Return the date that the template got for the rows in a folder; '' if it asked for none."""
    try:
        return str(read_sealed(folder / "dataset.json")["summary"]["date"])
    except (ValueError, KeyError, OSError):
        return ""


def bounded(options: DataOptions, positions: int | None) -> DataOptions:
    """Return options whose longest row a target with so many positions can read."""
    longest = min(options.max_length, positions or options.max_length)
    return options.model_copy(update={"max_length": longest})


def _too_long(longest: int, positions: int | None) -> str:
    what = f"the target's {longest} positions" if longest == positions else f"{longest} tokens"
    return f"{LONGER} {what}"


def _keep(
    rows: Iterable[Rendered | BadRow],
    options: DataOptions,
    report: DataReport,
    positions: int | None,
) -> Iterator[Rendered]:
    """Apply the policies: keep a row, cut it, leave it out, or raise `UsageError`.

    A row with images is not cut: the place of one may be at the cut.
    """
    longest = options.max_length
    for row in rows:
        report.notes.update(getattr(row, "notes", {}))
        policy: Any = options.bad_rows
        remedy = "correct it, or leave such rows out: data.bad_rows=skip"
        if isinstance(row, Rendered):
            where, length, answered = row.where, len(row.token_ids), row.loss_mask.any()
            overlong = answered and length > longest
            if overlong:
                report.overlong.append(length)
            if overlong and (row.images or options.overlong != "truncate"):
                policy = "refuse" if options.overlong == "refuse" else "skip"
                remedy = "set data.overlong=truncate or skip"
                remedy = remedy if longest == positions else f"raise data.max_length, or {remedy}"
                row = BadRow(where, _too_long(longest, positions), f"{length} tokens")
            elif row.loss_mask[:longest].any():
                report.kept += 1
                report.truncated += length > longest
                ids, mask = row.token_ids[:longest], row.loss_mask[:longest]
                yield Rendered(where, ids, mask, images=row.images)
                continue
            else:
                among = f" in the first {longest}" if answered else ""
                row = BadRow(where, f"{NO_ANSWER}{among}")
        if policy == "refuse":
            raise UsageError(f"{row}\n  {remedy}")
        report.skipped.append(row)


def _write(file: Path, rows: Iterable[Rendered], renderer: Renderer) -> dict[str, Any]:
    """Write the rows' tokens, and return what `Dataset` reads of them."""
    lengths: list[int] = []
    hashes: list[bytes] = []
    images: list[tuple[int, tuple[Image, ...]]] = []
    counts: Counter[int] = Counter()
    with open(file, "wb", opener=no_link) as output:
        for row in rows:
            tokens = np.empty(len(row.token_ids), TOKEN)
            tokens["id"], tokens["learned"] = row.token_ids, row.loss_mask
            output.write(tokens.tobytes())
            if row.images:
                images.append((len(lengths), row.images))
            lengths.append(len(tokens))
            hashes.append(_content(tokens, row.images))
            counts.update(row.token_ids[row.loss_mask].tolist())
    sync(file)
    fingerprint = _hash(*hashes).hex()
    ids = [_feature_id(fingerprint, row, content) for row, content in enumerate(hashes)]
    summary = {
        "fingerprint": fingerprint,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "loss_tokens": counts.total(),
        "max_length": max(lengths, default=0),
        "token_counts": sorted(counts.items()),
        "chat_template": renderer.template_hash,
        "date": renderer.date,
    }
    return {"feature_ids": ids, "lengths": lengths, "summary": summary, "images": images}


def _content(tokens: NDArray[Any], images: Iterable[Image]) -> bytes:
    """Return the digest of a row: of its tokens, and of what its images are."""
    columns = (tokens["id"].tobytes(), tokens["learned"].tobytes())
    digests = (image.digest.encode() for image in images)
    return _hash(len(tokens).to_bytes(8, "little"), *columns, *digests)


def images_key(
    images: Mapping[int, Iterable[Image]], report: DataReport, processor: ImageProcessor | None
) -> str:
    """Key of the image files and of the processor's settings; rows are rendered again when it changes.

    An image that could not be read counts too: it may be there now.
    """
    uris = {image.uri for row in images.values() for image in row}
    uris |= {bad.detail for bad in report.skipped if bad.reason == IMAGE_UNREAD}
    unloaded = any(bad.reason.startswith(NO_PROCESSOR) for bad in report.skipped)
    if processor is None or not (uris or unloaded):
        return ""
    times = [os.stat(uri).st_mtime_ns if os.path.exists(uri) else 0 for uri in sorted(uris)]
    return _hash(repr((times, processor.identity())).encode()).hex()


def _feature_id(fingerprint: str, row: int, content: bytes) -> str:
    return _hash(fingerprint.encode(), row.to_bytes(8, "little"), content, size=12).hex()


def _hash(*parts: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=size).digest()


@dataclass(frozen=True)
class Asked(Prompts):
    """Prompts with the `category` that each one's row names; '' where it names none."""

    categories: Sequence[str] = ()


def read_prompts(
    sources: Sources,
    tokenizer: PreTrainedTokenizerFast,
    limit: int | None,
    options: DataOptions,
    *,
    find: Find = open_files,
    date: str = "",
    positions: int | None = None,
) -> Asked:
    """Read what at most `limit` conversations ask of the model in their last assistant turn.

    A prompt over `max_length` tokens is left out, never cut: a cut one asks something else. So is one
    that another row asks. What is left out is printed on stderr, and counted. Raises `UsageError` as
    `build_dataset` does, and when no prompt is left.
    """
    options, report = bounded(options, positions), DataReport(named(sources))
    renderer, prompts = Renderer(tokenizer, options, date), dict[tuple[int, ...], str]()
    for row in read_conversations(sources, limit, find, options.columns):
        try:
            if isinstance(row, BadRow):
                raise RowError(row.reason, row.detail)
            prompt = tuple(renderer.prompt_ids(row))
            if len(prompt) > options.max_length:
                reason = f"the prompt is {_too_long(options.max_length, positions)}"
                raise RowError(reason, f"{len(prompt)} tokens")
            if prompt in prompts:
                raise RowError("another row asks the same", f"{len(prompt)} tokens")
            prompts[prompt] = getattr(row, "category", "")
        except RowError as error:
            report.skipped.append(BadRow(row.where, *error.args))
    report.kept = len(prompts)
    report.require_rows()
    if report.skipped:
        print(report.text(), file=sys.stderr)
    about = {
        "data": report.source,
        "data_digest": open_source(sources, find).key(),
        "chat_template": renderer.template_hash,
        "left_out": dict(Counter(bad.reason for bad in report.skipped)),
    }
    return Asked(list(prompts), about, list(prompts.values()))
