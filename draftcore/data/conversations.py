"""Read conversations: JSON lines, or Hugging Face datasets.

Two shapes of a row are understood, and mixtures of them, because real files mix them: OpenAI's
`messages` of {role, content} and ShareGPT's `conversations` of {from, value}. A source is a stream:
nothing here holds more than one row, and a row that cannot be used comes out as a `BadRow` with its
line number, in its place in the stream, so that the caller decides and nothing is lost silently.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.uris import parse_options

Message = Mapping[str, Any]

LIST_KEYS = ("messages", "conversations")
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"developer": "system", "human": "user", "gpt": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Conversation:
    """A usable row: messages with `role` and `content`, other keys as they stood in the source."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class BadRow(NamedTuple):
    """A row that cannot be used. `reason` is the same text for all rows of one kind."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


class RowError(DraftcoreError):
    """Raised with the `reason` and `detail` of a `BadRow` by what does not know where the row stands."""

    def __str__(self) -> str:
        return ": ".join(filter(None, self.args))


def read_conversations(source: str, limit: int | None = None) -> Iterator[Conversation | BadRow]:
    """Stream a source's rows, at most `limit` of them; for sources and errors see `open_source`."""
    return open_source(source).rows(limit)


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """The rows of JSON lines or of a table, and a key that changes when they do."""

    name: str
    files: Sequence[Path]  # that hold the rows, where they are local
    table: Any = None  # as `datasets` reads it; None for JSON lines

    def rows(self, limit: int | None = None) -> Iterator[Conversation | BadRow]:
        """Yield rows, at most `limit`, each with its line from 1, or its place in a table from 0."""
        for number, row in itertools.islice(self._numbered(), limit):
            where = f"{self.name}:{number}"
            try:
                yield parse_row(where, row)
            except RowError as error:
                yield BadRow(where, *error.args)

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        if self.table is not None:
            yield from enumerate(self.table)
            return
        with self.files[0].open("rb") as file:
            yield from ((at, line) for at, line in enumerate(file, start=1) if line.strip())

    def key(self) -> str:
        if not self.files:
            return str(self.table._fingerprint)
        digest = hashlib.blake2b(digest_size=16)
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()


def open_source(source: str) -> Source:
    """Find out what `source` names, and open it.

    It is a file of JSON lines, a parquet file, a folder saved by `datasets` or holding parquet
    files, or `hf:org/name?split=train&config=...&revision=...`. Raises `UsageError` for one that
    cannot be opened, before its first row.
    """
    name, _, query = source.removeprefix("hf:").partition("?")
    path = Path(name).expanduser()
    lines = path.is_file() and path.suffix != ".parquet"
    options = parse_options(source, query, () if lines else ("split", "config", "revision"))
    if lines:
        with path.open("rb") as file:
            if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise UsageError(
                    f"{path} is one JSON array, not JSON lines\n"
                    f"  convert it: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
                )
        return Source(path.name, [path])
    if path.exists():
        files = _table_files(path, options.get("split"))
        # Streamed: loading them would first copy them into a cache.
        given = {"data_files": list(map(str, files)), "split": "train", "streaming": True}
        return _table(source, path.name, files, {"path": files[0].suffix[1:], **given})
    if source.startswith("hf:"):
        given = {"path": name, "name": options.pop("config", None), "split": "train", **options}
        return _table(source, f"{name}[{given['split']}]", [], given)
    near = nearest(path.name, [file.name for file in path.parent.glob("*")])
    raise UsageError(
        f"no such data: {source}{near}\n"
        "  give a file of JSON lines, a dataset folder, or hf:org/name?split=train"
    )


def _table_files(path: Path, split: str | None) -> list[Path]:
    """Return the files of a table, or those of its split: train-00000.parquet, train/data-0.arrow."""
    # What `datasets` saves is called data-*.arrow or dataset.arrow; cache-*.arrow is something else.
    found = itertools.chain(path.rglob("*.parquet"), path.rglob("data*.arrow"))
    files = [path] if path.is_file() else sorted(found)
    if (path / "state.json").is_file():
        return files  # one saved table, which has no splits
    if (path / "dataset_dict.json").is_file():
        split = split or "train"
    chosen = [f for f in files if not split or f.parent.name == split or f.name.startswith(split)]
    if not chosen:
        known = {file.parent.name for file in files} | {file.name.split("-")[0] for file in files}
        what = (
            f"split {split!r}{nearest(split, known)}" if split else "dataset or parquet file in it"
        )
        there = ", ".join(file.name for file in (*files, *sorted(path.glob("*.jsonl"))))
        raise UsageError(f"{path} has no {what}\n  name one of its files instead: {there}")
    return chosen


def _table(source: str, name: str, files: Sequence[Path], options: Mapping[str, Any]) -> Source:
    """Open what `datasets.load_dataset` reads, and take from it what a conversation needs."""
    try:
        import datasets  # an extra, and a second to import: needed for these sources only
    except ImportError as error:
        raise UsageError(
            f"reading {source} needs the library `datasets`, which is not installed\n"
            "  pip install 'draftcore[datasets]'"
        ) from error
    try:
        table = datasets.load_dataset(**options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"cannot load the dataset {source}, split {options['split']}\n"
            f"  {type(error).__name__}: {error}\n"
            "  check the name, ?split= and &config=; a private one needs `hf auth login`"
        ) from error
    columns = table.column_names
    if not set(columns) & set(LIST_KEYS):
        raise UsageError(
            f"{name} has no column of conversations\n  columns: {', '.join(columns)}\n"
            f"  one of them has to be called {' or '.join(LIST_KEYS)}"
        )
    wanted = [column for column in columns if column in (*LIST_KEYS, "tools")]
    return Source(name, files, table.select_columns(wanted))


# ---------------------------------------------------------------- rows


def parse_row(where: str, row: Any) -> Conversation:
    """Check a row, which may be a line of JSON, and bring it into the shape {role, content}.

    Raises RowError.
    """
    if isinstance(row, bytes):
        row = _parse_json(row, "not valid JSON")
    _require(isinstance(row, Mapping), "the row is not an object", type(row).__name__)
    key = next((key for key in LIST_KEYS if row.get(key) is not None), "")
    _require(key, f"no {' or '.join(LIST_KEYS)}", "keys " + ", ".join(map(repr, row)))
    given = row[key]
    _require(isinstance(given, list), f"{key} is not a list", type(given).__name__)
    _require(given, "the conversation is empty")
    messages = tuple(_message(f"message {at}", one) for at, one in enumerate(given, start=1))
    roles = [message["role"] for message in messages]
    _require("assistant" in roles, "no assistant turn", f"roles {', '.join(roles)}")
    tools = row.get("tools") or []
    if isinstance(tools, str):  # as columnar files keep them
        tools = _parse_json(tools, "tools is not valid JSON") or []
    listed = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    _require(listed, "tools is not a list of objects")
    return Conversation(where, messages, tuple(tools))


def _message(name: str, message: Any) -> Message:
    kind = type(message).__name__
    _require(isinstance(message, Mapping), "a message is not an object", f"{name}: {kind}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.pop("role", fields.pop("from", None))
    content = fields.pop("content", fields.pop("value", None))
    _require(role is not None, "a message has no role", name)
    if str(role) not in ROLES:
        raise RowError("unknown role", f"{name}: {role!r}{nearest(str(role), ROLES)}")
    if content is None and fields.get("tool_calls"):
        content = ""  # an assistant that only calls tools has null content in OpenAI's shape
    name, kind = f"{name} ({role})", type(content).__name__
    _require(content is not None, "a message has no content", name)
    _require(isinstance(content, str), "content is not text", f"{name}: {kind}")
    return {"role": ROLES[str(role)], "content": content, **fields}


def _parse_json(text: str | bytes, reason: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        raise RowError(reason, f"{error.msg}, column {error.colno}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise RowError(reason, str(error)) from None


def _require(met: object, reason: str, detail: str = "") -> None:
    if not met:
        raise RowError(reason, detail)
