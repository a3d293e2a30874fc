"""Open what `data.train` and `data.eval` name, by the plugin that offers the source of its scheme.

Files without one are JSON lines, the source `jsonl` here, unless they are tables, compressed
or lie elsewhere (`scheme://`): those are the source `files`. Several sources follow each other. A
source is a stream: nothing here holds more than one row.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from draftcore.errors import UsageError, nearest
from draftcore.files import regular
from draftcore_data.conversations import Row, parse_row
from draftcore_data.options import Sources
from draftcore_data.source import Source

PLUGIN_SCHEME = re.compile(r"([a-z][\w+.-]+):(?!//|:)")
TABLE_SUFFIXES = (".arrow", ".parquet")
OTHER_SUFFIXES = (*TABLE_SUFFIXES, ".bz2", ".gz", ".xz", ".zip", ".zst")

Find = Callable[[str], Source]  # opens the URI of a plugin's source


def finder(bind: Callable[[str, str], Any]) -> Find:
    """Return what opens a URI by the plugin that offers its scheme; `bind` takes kind and name."""

    def find(uri: str) -> Source:
        name = uri.partition(":")[0]
        return cast(Source, bind("source", name).hook.source(name=name, uri=uri))

    return find


class Line(bytes):
    """A line of a file in `folder`, which the paths in it are relative to."""

    folder: str


@dataclass(frozen=True)
class JsonLines:
    """The lines of local files, each named by its file and its number from 1; empty ones are none."""

    files: Sequence[Path]

    def key(self) -> str:
        return content_key(self.files)

    def rows(self) -> Iterator[tuple[str, Any]]:
        above = os.path.commonpath([file.parent for file in self.files])
        for file in self.files:
            with regular(file).open("rb") as lines:
                yield from lines_of(str(file), above, lines)


def content_key(files: Iterable[str | Path]) -> str:
    """Return what changes when the content of a file on this machine does."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with regular(Path(file)).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def lines_of(file: str, above: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Line]]:
    """Yield the lines of a file, each with its place below the folder `above`."""
    name, folder = os.path.relpath(file, above), os.path.dirname(os.path.abspath(file))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = Line(line)
            row.folder = folder
            yield f"{name}:{number}", row


def _files(name: str) -> list[Path]:
    """Return the files that a path, a folder or a glob names, in the order of their names."""
    path = Path(name).expanduser()
    files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    if path.is_dir():
        among = path.rglob("*")
        files = [f for f in among if ".jsonl" in f.name or f.suffix in TABLE_SUFFIXES]
    return sorted(file for file in files if regular(file).is_file())


def open_lines(uri: str) -> JsonLines:
    """Open `jsonl:PATH`, where PATH is a file, a folder or a glob. Raises `UsageError`."""
    name = uri.removeprefix("jsonl:")
    if not (files := _files(name)):
        near = nearest(Path(name).name, [file.name for file in Path(name).parent.glob("*")])
        raise UsageError(
            f"no such data: {name}{near}\n"
            "  give JSON lines (a file, a glob, a folder of *.jsonl), a table of parquet files, or\n"
            "  hf:org/name?split=train"
        )
    try:
        with regular(files[0]).open("rb") as stream:
            require_lines(str(files[0]), stream.read(64))
    except OSError as error:
        raise UsageError(f"cannot open {name}\n  {error}") from error
    return JsonLines(files)


def require_lines(file: str, head: bytes) -> None:
    """Raise `UsageError` for a file that begins as a JSON array does."""
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise UsageError(
            f"{file} is one JSON array, not JSON lines\n"
            f"  convert it: jq -c '.[]' {file} > {Path(file).with_suffix('.jsonl')}"
        )


# ---------------------------------------------------------------- sources of all kinds


def read_conversations(
    sources: Sources, limit: int | None = None, find: Find = open_lines
) -> Iterator[Row]:
    """Stream the rows of sources, at most `limit` of them; for errors see `open_source`."""
    return itertools.starmap(parse_row, itertools.islice(open_source(sources, find).rows(), limit))


def named(sources: Sources) -> str:
    """Return the names of sources, for a message."""
    return sources if isinstance(sources, str) else ", ".join(_weighted(s)[0] for s in sources)


def open_source(sources: Sources, find: Find = open_lines) -> Source:
    """Open all that a run names as its data, as one source.

    Raises `UsageError` for what cannot be opened, before its first row.
    """
    if isinstance(sources, str):
        return _open(sources, find)
    return Mixture([(weight, _open(name, find)) for name, weight in map(_weighted, sources)])


@dataclass(frozen=True)
class Mixture:
    """Sources one after the other, each row as often as the source's weight says.

    Weight 2 is each row twice; 0.5 is each with a chance of a half, and always the same rows.
    """

    parts: Sequence[tuple[float, Source]]

    def key(self) -> str:
        return "\0".join(f"{weight} {source.key()}" for weight, source in self.parts)

    def rows(self) -> Iterator[tuple[str, Any]]:
        for weight, source in self.parts:
            dice = random.Random(0)
            for row in source.rows():
                yield from itertools.repeat(row, int(weight + dice.random()))


def _weighted(source: Any) -> tuple[str, float]:
    return (source, 1.0) if isinstance(source, str) else (source.source, source.weight)


def _open(source: str, find: Find) -> Source:
    if PLUGIN_SCHEME.match(source):
        return find(source)
    name, _, query = source.partition("?")
    others = "://" in name or query or any(file.suffix in OTHER_SUFFIXES for file in _files(name))
    return find(f"{'files' if others else 'jsonl'}:{source}")
