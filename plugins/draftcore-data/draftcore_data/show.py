"""What a run learns of its data: some rows as they are learned, and figures over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftcore.contracts.run import OpenRun
from draftcore.errors import printable
from draftcore_data.dataset import Dataset

Part = tuple[str, bool]  # text, and whether it is learned


@dataclass(frozen=True)
class Row:
    """A row as it is learned: its text in parts."""

    tokens: int
    learned: int
    parts: list[Part]

    def text(self, mark: Callable[[str], str]) -> str:
        return "".join(mark(text) if learned else text for text, learned in self.parts)


def lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `figures` by name, for people."""
    left_out = len(found["left_out"])
    yield "rows kept", f"{found['kept']:,} of {found['kept'] + left_out:,}"
    yield "tokens", f"{found['tokens']:,}, {found['learned']:.1%} of them learned"
    names = {"min": "min", "median": "median", "p95": "95 %", "max": "max"}
    yield "lengths", ", ".join(f"{names[k]} {v:,}" for k, v in found["lengths"].items())
    fits = f"{found['max_length']:,} holds {found['within_max_length']:.1%} of the rows"
    yield "data.max_length", f"{fits}, {found['max_length_for_95']:,} would hold 95 %"
    for label, (size, share) in found["draft_vocabulary"].items():
        name = f"draft vocabulary {label}".rstrip()
        yield name, f"{size:,} tokens cover {share:.2%} of what is learned"
    if left_out:
        yield "left out, each with why", found["report"]


def rows_of(dataset: Dataset, tokenizer: Any, rows: Iterable[int]) -> Iterator[Row]:
    """Yield rows in parts that are learned and parts that are not, in turn."""
    for row in rows:
        ids, mask = dataset.tokens(row), dataset.loss_mask(row)
        edges = np.flatnonzero(np.diff(mask)) + 1
        parts = zip(np.split(ids, edges), np.split(mask, edges), strict=True)
        texts = [(tokenizer.decode(part.tolist()), bool(on[0])) for part, on in parts]
        yield Row(len(ids), int(mask.sum()), [(printable(text), on) for text, on in texts])


def figures(run: OpenRun, dataset: Dataset) -> dict[str, Any]:
    """Count over all rows, those that are too long included.

    `notes` say what the chat template drops, `unread` counts rows by the keys that are not read.
    `within_max_length` is the share of rows that are not longer, `max_length_for_95` one that 95 % of
    them fit in. `draft_vocabulary` has, by the label of each draft that prunes its vocabulary, its size
    and the share of the learned tokens in it.
    """
    report, summary = dataset.report, dataset.summary
    longest = run.data.longest
    whole = dataset.lengths[dataset.lengths < longest]
    cut = dataset.lengths[dataset.lengths == longest][report.truncated :]
    lengths = np.sort(np.concatenate([whole, cut, np.array(report.overlong, np.int64)]))
    low, median, most, high = np.quantile(
        lengths, [0, 0.5, 0.95, 1], method="inverted_cdf"
    ).tolist()
    return {
        "source": report.source,
        "kept": report.kept,
        "truncated": report.truncated,
        "left_out": [bad._asdict() for bad in report.skipped],
        "tokens": summary.tokens,
        "learned": summary.loss_tokens / summary.tokens,
        "lengths": {"min": low, "median": median, "p95": most, "max": high},
        "max_length": longest,
        "within_max_length": float((lengths <= longest).mean()),
        "max_length_for_95": most,
        "draft_vocabulary": coverage(run, dataset),
        "notes": [note.format(count) for note, count in report.notes.items()],
        "unread": dict(report.unread),
        "report": str(dataset.file.with_name("dataset.json")),
    }


def coverage(run: OpenRun, dataset: Dataset) -> dict[str, tuple[int, float]]:
    """Return, by draft, the size of a pruned vocabulary, and the share of learned tokens in it.

    A draft with such a vocabulary has its size in the option `draft_vocab_size`, as servers call it,
    and takes the most frequent tokens.
    """
    counts = sorted(dataset.summary.token_counts.values(), reverse=True)
    sizes = {d.label: getattr(d.options, "draft_vocab_size", None) for d in run.drafts}
    total = sum(counts)
    return {label: (size, sum(counts[:size]) / total) for label, size in sizes.items() if size}
