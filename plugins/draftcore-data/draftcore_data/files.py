"""The source `files`: files on this machine, or wherever fsspec reaches, and tables."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem

from draftcore.errors import UsageError, nearest, raised
from draftcore.files import regular
from draftcore.uris import parse_options
from draftcore_data.lines import content_key, opened_as_utf8, rows_of
from draftcore_data.source import Source
from draftcore_data.tables import open_table

TABLE_SUFFIXES = (".arrow", ".parquet")
TORN = "it is torn: copy it, or pack it, anew"
FAR = "check the name and what it takes to read it, or copy the file here and name that"
TO_UTF8 = "save it as UTF-8, as by: iconv -f latin1 -t utf-8 OLD > NEW"


@dataclass(frozen=True)
class Files:
    """The rows of files, each named by its file and its line, or number, from 1; empty lines are none."""

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
                for place, row in rows_of(file, above):
                    yield place, row
            except UsageError:
                raise
            except Exception as error:  # of compression, or of a file system: others wrote them
                what = f"{file.path} cannot be read after {place}\n  {raised(error)}"
                remedy = TO_UTF8 if isinstance(error, UnicodeError) else TORN
                raise UsageError(f"{what}\n  {remedy}") from error


def open_files(uri: str) -> Source:
    """Open `files:PLACE`: a path or `scheme://` of a file, a folder or a glob. Raises `UsageError`."""
    source = uri.removeprefix("files:")
    name, _, query = source.partition("?")
    path, far = Path(name).expanduser(), "://" in source
    if path.suffix in TABLE_SUFFIXES or any(
        file.suffix in TABLE_SUFFIXES for file in path.rglob("*")
    ):
        return open_table(f"hf:{source}")
    if not far:
        parse_options(source, query, ())
    try:
        files = _far(source) if far else _near(path)
        for file in files[:1]:
            with opened_as_utf8(file):
                pass
    except UsageError:
        raise
    except Exception as error:  # of a file system, which others wrote
        raise UsageError(f"cannot open {source}\n  {raised(error)}\n  {FAR}") from error
    if files:
        return Files(files)
    if path.is_dir():
        there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        raise UsageError(
            f"no data in the folder {source}: there is {there}\n"
            f"  read are its *.jsonl and tables of parquet files; name others by a glob: {source}/*.json"
        )
    near = "" if far else nearest(path.name, [file.name for file in path.parent.glob("*")])
    raise UsageError(
        f"no such data: {source}{near}\n"
        "  give JSON lines (a file, a glob, a folder of *.jsonl), a table of parquet files, or\n"
        "  hf:org/name?split=train"
    )


def _near(path: Path) -> list[Any]:
    """Return the files that a path, a folder or a glob names, in the order of their names."""
    files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    if path.is_dir():
        files = [file for file in path.rglob("*") if ".jsonl" in file.name]
    found = sorted(file for file in files if regular(file).is_file())
    return [OpenFile(LocalFileSystem(), str(file)) for file in found]


def _far(source: str) -> list[Any]:
    """Return the same of a place that fsspec reaches, a `file://` too."""
    system, path = fsspec.url_to_fs(source)
    if system.isdir(path):
        found = [file for file in system.find(path) if ".jsonl" in os.path.basename(file)]
    else:
        found = [path] if system.isfile(path) else system.glob(path)
    if isinstance(system, LocalFileSystem):
        found = [str(regular(Path(file))) for file in found]
    return [OpenFile(system, file) for file in sorted(found)]
