"""The source `files`: JSON lines that are compressed or lie elsewhere, by fsspec, and tables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from draftcore.errors import UsageError, raised
from draftcore.files import regular
from draftcore.uris import parse_options
from draftcore_data.source import Source
from draftcore_data.sources import TABLE_SUFFIXES, content_key, lines_of, require_lines
from draftcore_data.tables import open_table

TORN = "it is torn, or packed otherwise than its name says: copy it, or pack it, anew"
FAR = "check the name and what it takes to read it, or copy the file here and name that"


@dataclass(frozen=True)
class FarLines:
    """The lines of files that fsspec opens."""

    files: Sequence[Any]  # fsspec's OpenFile

    def key(self) -> str:
        if all(isinstance(file.fs, LocalFileSystem) for file in self.files):
            return content_key(file.path for file in self.files)
        told = [str(file.fs.checksum(file.path)) for file in self.files]
        return hashlib.blake2b("".join(told).encode(), digest_size=16).hexdigest()

    def rows(self) -> Iterator[tuple[str, Any]]:
        above = os.path.commonpath([os.path.dirname(file.path) for file in self.files])
        for file in self.files:
            place = "its beginning"
            try:
                with file as lines:
                    for place, line in lines_of(file.path, above, lines):
                        yield place, line
            except Exception as error:  # of compression, or of a file system: others wrote them
                what = f"{file.path} cannot be read after {place}"
                raise UsageError(f"{what}\n  {raised(error)}\n  {TORN}") from error


def open_files(uri: str) -> Source:
    """Open `files:PLACE`: a path or `scheme://` of a file, a folder or a glob. Raises `UsageError`."""
    source = uri.removeprefix("files:")
    name, _, query = source.partition("?")
    path = Path(name).expanduser()
    if path.suffix in TABLE_SUFFIXES or any(
        file.suffix in TABLE_SUFFIXES for file in path.rglob("*")
    ):
        return open_table(f"hf:{source}")
    if "://" in source:
        name = source
    else:
        name = str(path)
        parse_options(source, query, ())
    try:
        files = _files(name)
        for file in files[:1]:
            with file as opened:
                require_lines(file.path, opened.read(64))
    except UsageError:
        raise
    except Exception as error:  # of a file system, which others wrote
        raise UsageError(f"cannot open {source}\n  {raised(error)}\n  {FAR}") from error
    if not files:
        raise UsageError(f"no such data: {source}\n  give a file, a glob, or a folder of *.jsonl")
    return FarLines(files)


def _files(name: str) -> list[Any]:
    """Return the files that a path, a folder or a glob names, in the order of their names."""
    system, path = fsspec.url_to_fs(name)
    if system.isdir(path):
        found = [one for one in system.find(path) if ".jsonl" in os.path.basename(one)]
    else:
        found = [path] if system.isfile(path) else system.glob(path)
    if isinstance(system, LocalFileSystem):
        found = [str(regular(Path(one))) for one in found]
    packed = {one: fsspec.utils.infer_compression(one) for one in sorted(found)}
    if any(one.endswith(".zst") and how is None for one, how in packed.items()):
        raise ValueError("it needs the package zstandard: pip install zstandard")
    return [fsspec.core.OpenFile(system, one, compression=how) for one, how in packed.items()]
