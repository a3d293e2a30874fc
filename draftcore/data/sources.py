"""Open what `data.train` and `data.eval` name: JSON lines wherever they lie, and plugins' sources.

The core reads JSON lines, plain or compressed: a file, a folder, a glob, and what fsspec reaches by
`scheme://`. `scheme:` without slashes is a plugin's, and tables are those of `hf:`. Several sources
follow each other. A source is a stream: nothing here holds more than one row.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftcore.config import Sources
from draftcore.contracts.source import Source
from draftcore.data.conversations import Row, parse_row
from draftcore.errors import UsageError, nearest
from draftcore.uris import parse_options

PLUGINS = re.compile(r"([a-z][\w+.-]+):(?!//|:)")
TABLES = (".parquet", ".arrow")

Find = Callable[[str], Source]  # opens the URI of a plugin's source


def no_plugins(uri: str) -> Source:
    """Refuse a plugin's source, where no run says which plugins there are."""
    raise UsageError(f"{uri} is read by a plugin, and here only files are\n  name JSON lines")


def read_conversations(
    given: Sources, limit: int | None = None, find: Find = no_plugins
) -> Iterator[Row]:
    """Stream the rows of sources, at most `limit` of them; for errors see `open_source`."""
    return itertools.starmap(parse_row, itertools.islice(open_source(given, find).rows(), limit))


def named(given: Sources) -> str:
    """Return the names of sources, for a message."""
    return given if isinstance(given, str) else ", ".join(_weighted(one)[0] for one in given)


def open_source(given: Sources, find: Find = no_plugins) -> Source:
    """Open all that `given` names, as one source.

    Raises `UsageError` for what cannot be opened, before its first row.
    """
    if isinstance(given, str):
        return _open(given, find)
    weighted = [_weighted(one) for one in given]
    return Mixture([(weight, _open(source, find)) for source, weight in weighted])


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


class Line(bytes):
    """A line of a file in `folder`, which the paths in it are relative to."""

    folder: str


@dataclass(frozen=True)
class JsonLines:
    """The lines of files, each named by its file and its number from 1; empty ones are none."""

    files: Sequence[Any]  # fsspec's OpenFile

    def key(self) -> str:
        from fsspec.implementations.local import LocalFileSystem

        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            if isinstance(file.fs, LocalFileSystem):
                with open(file.path, "rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
            else:
                digest.update(str(file.fs.checksum(file.path)).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[tuple[str, Any]]:
        paths = [file.path for file in self.files]
        above = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
        for file in self.files:
            name, number = os.path.relpath(file.path, above), 0
            folder = os.path.dirname(os.path.abspath(file.path))
            try:
                with file as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip():
                            row = Line(line)
                            row.folder = folder
                            yield f"{name}:{number}", row
            except Exception as error:  # of compression, or of a file system: others wrote them
                what = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"{file.path} cannot be read after line {number}\n  {what}"
                ) from error


def _weighted(one: Any) -> tuple[str, float]:
    return (one, 1.0) if isinstance(one, str) else (one.source, one.weight)


def _open(source: str, find: Find) -> Source:
    """Find out what one source is, and open it."""
    name, _, query = source.partition("?")
    if PLUGINS.match(source):
        return find(source)
    if name.endswith(TABLES) or _holds_tables(name):
        return find(f"hf:{source}")
    if "://" in source:
        name = source
    else:
        name = str(Path(name).expanduser())
        parse_options(source, query, ())
    try:
        files, head = _files(name), b""
        for file in files[:1]:
            with file as opened:
                head = bytes(opened.read(64))
    except Exception as error:  # of a file system, which others wrote
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot open {source}\n  {what}") from error
    if not files:
        near = nearest(Path(name).name, [file.name for file in Path(name).parent.glob("*")])
        raise UsageError(
            f"no such data: {source}{near}\n"
            "  give JSON lines (a file, a glob, a folder of *.jsonl), a table of parquet files, or\n"
            "  hf:org/name?split=train"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        path = files[0].path
        raise UsageError(
            f"{path} is one JSON array, not JSON lines\n"
            f"  convert it: jq -c '.[]' {path} > {Path(path).with_suffix('.jsonl')}"
        )
    return JsonLines(files)


def _holds_tables(name: str) -> bool:
    path = Path(name).expanduser()
    return path.is_dir() and any(file.suffix in TABLES for file in path.rglob("*"))


def _files(name: str) -> list[Any]:
    """Return the files that a path, a folder or a glob names, in the order of their names."""
    import fsspec

    system, path = fsspec.url_to_fs(name)
    if system.isdir(path):
        found = [one for one in system.find(path) if ".jsonl" in os.path.basename(one)]
    else:
        found = [path] if system.isfile(path) else system.glob(path)
    packed = {one: fsspec.utils.infer_compression(one) for one in sorted(found)}
    if any(one.endswith(".zst") and how is None for one, how in packed.items()):
        raise ValueError("it needs the package zstandard: pip install zstandard")
    return [fsspec.core.OpenFile(system, one, compression=how) for one, how in packed.items()]
