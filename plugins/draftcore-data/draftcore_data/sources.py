"""Open what `data.train` and `data.eval` name, by the plugin that offers the source of its scheme.

What has no scheme, or one with slashes (`s3://`), is read by the source `files`. Several sources follow
each other. A source is a stream: nothing here holds more than one row.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from draftcore.errors import UsageError, nearest
from draftcore_data.conversations import Row, parse_row
from draftcore_data.files import open_files
from draftcore_data.options import Sources
from draftcore_data.source import Source

FIRST = 1000  # rows of each source in which a column has to be
PLUGIN_SCHEME = re.compile(r"([a-z][\w+.-]+):(?!//|:)")

Find = Callable[[str], Source]  # opens the URI of a plugin's source


def finder(bind: Callable[[str, str], Any]) -> Find:
    """Return what opens a URI by the plugin that offers its scheme; `bind` takes kind and name."""

    def find(uri: str) -> Source:
        name = uri.partition(":")[0]
        return cast(Source, bind("source", name).hook.source(name=name, uri=uri))

    return find


def read_conversations(
    sources: Sources,
    limit: int | None = None,
    find: Find = open_files,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Row]:
    """Stream the rows of sources, at most `limit` of them; for errors see `open_source`."""
    rows = itertools.islice(open_source(sources, find).rows(), limit)
    return itertools.starmap(functools.partial(parse_row, columns=columns), rows)


def named(sources: Sources) -> str:
    """Return the names of sources, for a message."""
    return sources if isinstance(sources, str) else ", ".join(_weighted(s)[0] for s in sources)


def open_source(sources: Sources, find: Find = open_files) -> Source:
    """Open all that a run names as its data, as one source.

    Raises `UsageError` for what cannot be opened, before its first row.
    """
    if isinstance(sources, str):
        return _open(sources, find)
    return Mixture([(weight, _open(name, find)) for name, weight in map(_weighted, sources)])


def require_columns(sources: Sources, columns: Mapping[str, str], find: Find = open_files) -> None:
    """Raise UsageError for a column that none of the first rows of any source has."""
    seen = dict[str, None]()
    for source in ([sources] if isinstance(sources, str) else sources) if columns else ():
        for _, row in itertools.islice(_open(_weighted(source)[0], find).rows(), FIRST):
            with suppress(ValueError, RecursionError, TypeError):  # of a row that is no object
                seen |= dict.fromkeys(json.loads(row) if isinstance(row, bytes) else row)
    for key, column in columns.items():
        if seen and column not in seen:
            raise UsageError(
                f"data.columns.{key}: no row has {column!r}{nearest(column, seen)}\n"
                f"  the keys of the first rows: {', '.join(seen)}"
            )


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
    return find(source if PLUGIN_SCHEME.match(source) else f"files:{source}")
