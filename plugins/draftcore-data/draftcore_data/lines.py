"""The rows in a file, each as a line of JSON, whatever the file is: its first bytes tell, not its name.

Packed files are unpacked and UTF-16 is read by its mark. JSON that is an array, or stands on several
lines, is read whole; anything else is lines of JSON, of which nothing holds more than one. The exceptions
are `.csv` and `.tsv`, which their names tell alone.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fsspec.compression import compr

from draftcore.errors import UsageError
from draftcore.files import regular
from draftcore_data.source import SHAPES

# How files begin that are packed, with fsspec's name for it, and tables, with what their names end in.
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
PACKED |= {b"PK\x03\x04": "zip"}
TABLES = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
SEPARATED = re.compile(r"\.([ct])sv(\.(gz|bz2|xz|zst|zip))?$")
SPACE = re.compile(r"\s*")


class Line(bytes):
    """A line of a file in `folder`, which the paths in it are relative to."""

    folder: str


def content_key(files: Iterable[str | Path]) -> str:
    """Return what changes when the content of a file on this machine does."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with regular(Path(file)).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def rows_of(file: Any, above: str) -> Iterator[tuple[str, Line]]:
    """Yield the rows of a file, fsspec's OpenFile, each with its place below the folder `above`."""
    name, folder = os.path.relpath(file.path, above), os.path.dirname(os.path.abspath(file.path))
    with opened_as_utf8(file) as stream:
        for number, text in _texts(file.path, stream):
            if text.strip():
                row = Line(text)
                row.folder = folder
                yield f"{name}:{number}", row


@contextmanager
def opened_as_utf8(file: Any) -> Iterator[io.BufferedReader]:
    """Open what a file holds: unpacked, and UTF-16 as UTF-8. Raises `UsageError` for a table."""
    with ExitStack() as to_close:

        def buffered(stream: Any) -> io.BufferedReader:
            return to_close.enter_context(io.BufferedReader(stream))

        stream = buffered(to_close.enter_context(file))
        head = stream.peek(6)
        for begins, ending in TABLES.items():
            if head.startswith(begins):
                raise UsageError(f"{file.path} is a table\n  have its name end in {ending}")
        if how := next((how for begins, how in PACKED.items() if head.startswith(begins)), ""):
            if how not in compr:
                raise UsageError(
                    f"cannot open {file.path}: it is packed by {how}\n  pip install zstandard"
                )
            stream = buffered(compr[how](stream, mode="rb"))
            head = stream.peek(6)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            stream = buffered(io.BytesIO(stream.read().decode("utf-16").encode()))
        elif head.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream


def _texts(file: str, stream: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield each row as JSON, with the number of its line, or of the row itself where lines are none."""
    if found := SEPARATED.search(file):
        csv.field_size_limit(2**31 - 1)
        with io.TextIOWrapper(stream, "utf-8", newline="") as text:
            reader = csv.DictReader(text, delimiter="," if found[1] == "c" else "\t")
            for row in reader:
                yield reader.line_num, json.dumps({key: row[key] or None for key in row}).encode()
        return
    lines: Iterator[tuple[int, bytes]] = enumerate(stream, start=1)
    number, first = next(((n, line) for n, line in lines if line.strip()), (1, b""))
    begins = first.strip()
    if begins.startswith(b"[") or begins.endswith((b"{", b"[")) or not stream.peek(1):
        whole = first + stream.read()
        if (rows := _rows_of_json(file, whole)) is not None:
            yield from enumerate((json.dumps(row).encode() for row in rows), start=1)
            return
        lines = enumerate(io.BytesIO(whole), start=number)
    else:
        yield number, first
    yield from lines


def _rows_of_json(file: str, whole: bytes) -> list[Any] | None:
    """Return the rows of an array, of an object that holds one, or of objects that follow each other.

    None for what is no JSON from its first character on. Raises `UsageError` for what is up to some place.
    """
    values, at, decoder = list[Any](), 0, json.JSONDecoder()
    try:
        text = whole.decode().strip()
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            values.append(value)
            at = SPACE.match(text, end).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        array, lines = whole.lstrip().startswith(b"["), whole.strip().count(b"\n")
        if not (array or (values and lines)):
            return None
        raise UsageError(
            f"{file} is not valid JSON: {error}\n  correct it, or copy it anew if it is torn"
        ) from None
    if len(values) == 1 and isinstance(values[0], dict) and not values[0].keys() & SHAPES.keys():
        lists = [value for value in values[0].values() if isinstance(value, list)]
        values = [rows for rows in lists if rows and isinstance(rows[0], dict)][:1] or values
    return [row for value in values for row in (value if isinstance(value, list) else [value])]
