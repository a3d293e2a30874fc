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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from draftcore.errors import UsageError, nearest

Message = Mapping[str, Any]

LIST_KEYS = ("messages", "conversations")
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
HASH_BLOCK = 1 << 22


@dataclass(frozen=True)
class Conversation:
    """A usable row: messages with `role` and `content`, other keys as they stood in the source."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. `reason` is the same text for all rows of one kind."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f": {self.detail}" if self.detail else "")


def read_conversations(source: str, limit: int | None = None) -> Iterator[Conversation | BadRow]:
    """Stream a source's rows, at most `limit` of them.

    `source` is a file of JSON lines, a parquet file, a folder saved by `datasets` or holding
    parquet files, or `hf:org/name?split=train&config=...&revision=...`. Raises `UsageError` at the
    call, before the first row, when the source cannot be opened.
    """
    return conversations(open_source(source), limit)


def conversations(source: Source, limit: int | None = None) -> Iterator[Conversation | BadRow]:
    """Stream an open source's rows; a generator over `source.rows()`."""
    for where, row in itertools.islice(source.rows(), limit):
        yield row if isinstance(row, BadRow) else parse_row(where, row)


# ---------------------------------------------------------------- sources


class Source(Protocol):
    """Rows with where they stand, and a key that changes when they do."""

    def rows(self) -> Iterator[tuple[str, Any]]: ...
    def key(self) -> str: ...


def open_source(source: str) -> Source:
    """Find out what `source` names; see `read_conversations` for the forms and errors."""
    name, _, query = source.removeprefix("hf:").partition("?")
    path = Path(name).expanduser()
    options = _query_options(source, query)
    if source.startswith("hf:") and not path.exists():
        return _hub_table(name, options)
    if path.is_dir():
        return _folder_table(path, options)
    if not path.is_file():
        raise UsageError(
            f"no such data: {source}{_sibling(path)}\n"
            "  give a file of JSON lines, a dataset folder, or hf:org/name?split=train"
        )
    if path.suffix == ".parquet":
        return _parquet_table(path, [path], options)
    if options:
        raise UsageError(
            f"{source}: a file of JSON lines has no split or config\n  leave out ?{query}"
        )
    return JsonLines(path)


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line; empty lines are passed over but counted as lines."""

    path: Path

    def __post_init__(self) -> None:
        with self.path.open("rb") as file:
            if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise UsageError(
                    f"{self.path} is one JSON array, not JSON lines\n"
                    f"  convert it: jq -c '.[]' {self.path} > {self.path.with_suffix('.jsonl')}"
                )

    def rows(self) -> Iterator[tuple[str, Any]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{self.path.name}:{number}"
                    yield where, _parse_line(where, line)

    def key(self) -> str:
        return _hash_files([self.path])


@dataclass(frozen=True)
class Table:
    """Rows of a Hugging Face dataset, counted from 0 as `datasets` does."""

    name: str
    table: Any
    fingerprint: str

    def rows(self) -> Iterator[tuple[str, Any]]:
        columns = self.table.column_names  # unknown (None) for some streamed files
        table = self.table
        if columns is not None:
            if not set(columns) & set(LIST_KEYS):
                raise UsageError(
                    f"{self.name} has no column of conversations\n"
                    f"  columns: {', '.join(columns)}\n"
                    f"  one of them has to be called {' or '.join(LIST_KEYS)}"
                )
            table = table.select_columns([c for c in columns if c in (*LIST_KEYS, "tools")])
        for number, row in enumerate(table):
            yield f"{self.name}:{number}", row

    def key(self) -> str:
        return self.fingerprint


def _hub_table(name: str, options: Mapping[str, str]) -> Table:
    datasets = _import_datasets(f"hf:{name}")
    split = options.get("split", "train")
    try:
        table = datasets.load_dataset(
            name, options.get("config"), split=split, revision=options.get("revision")
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"cannot load the dataset hf:{name}, split {split}\n"
            f"  {type(error).__name__}: {error}\n"
            "  check the name, ?split= and &config=; a private one needs `hf auth login`"
        ) from error
    return Table(f"{name}[{split}]", table, table._fingerprint)


def _folder_table(path: Path, options: Mapping[str, str]) -> Table:
    """A folder written by `save_to_disk`, or one with parquet files in it."""
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        table = _import_datasets(str(path)).load_from_disk(str(path))
        if isinstance(table, dict):  # DatasetDict: splits by name
            split = options.get("split", "train")
            if split not in table:
                raise UsageError(
                    f"{path} has no split {split!r}{nearest(split, table)}\n"
                    f"  splits: {', '.join(table)}\n"
                    f"  choose one: {path}?split={next(iter(table))}"
                )
            table = table[split]
        return Table(path.name, table, table._fingerprint)
    files = sorted(path.rglob("*.parquet"))
    if files:
        return _parquet_table(path, files, options)
    lines = ", ".join(sorted(p.name for p in path.glob("*.jsonl")))
    raise UsageError(
        f"{path} is a folder, but no dataset: not saved by `datasets`, and no parquet files in it\n"
        + (f"  name one of its files instead: {lines}" if lines else "  name a file of JSON lines")
    )


def _parquet_table(path: Path, files: list[Path], options: Mapping[str, str]) -> Table:
    """Parquet files are streamed: loading them would first copy them into a cache."""
    datasets = _import_datasets(str(path))
    split = options.get("split")
    if split is not None:
        # Files are named by split: train-00000-of-00002.parquet, or train/0000.parquet.
        files = [f for f in files if f.name.startswith(split) or f.parent.name == split]
    if not files:
        raise UsageError(f"{path} has no parquet file of split {split!r}\n  leave out ?split=")
    table = datasets.load_dataset(
        "parquet", data_files=[str(f) for f in files], split="train", streaming=True
    )
    return Table(path.name, table, _hash_files(files))


def _import_datasets(source: str) -> Any:
    try:
        import datasets  # an extra, and a second to import: needed for these sources only
    except ImportError as error:
        raise UsageError(
            f"reading {source} needs the library `datasets`, which is not installed\n"
            "  pip install 'draftcore[datasets]'"
        ) from error
    return datasets


def _query_options(source: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query))
    known = ("split", "config", "revision")
    for name in options:
        if name not in known:
            raise UsageError(
                f"{source}: unknown option {name!r}{nearest(name, known)}\n"
                f"  options: {', '.join(known)}"
            )
    return options


def _sibling(path: Path) -> str:
    """A did-you-mean among the files beside `path`."""
    folder = path.parent
    return nearest(path.name, (p.name for p in folder.iterdir())) if folder.is_dir() else ""


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- rows


class _UnusableError(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


def parse_row(where: str, row: Any) -> Conversation | BadRow:
    """Check one row and bring it into the shape {role, content}."""
    try:
        messages = tuple(_message(i, m) for i, m in enumerate(_message_list(row), start=1))
        if not any(m["role"] == "assistant" for m in messages):
            raise _UnusableError(
                "no assistant turn", "roles " + ", ".join(m["role"] for m in messages)
            )
        return Conversation(where, messages, _tools(row.get("tools")))
    except _UnusableError as error:
        return BadRow(where, error.reason, error.detail)


def _parse_line(where: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(where, "not UTF-8", f"byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(where, "not valid JSON", f"{error.msg}, column {error.colno}")
    except RecursionError:
        return BadRow(where, "not valid JSON", "nested too deeply")


def _message_list(row: Any) -> list[Any]:
    if not isinstance(row, Mapping):
        raise _UnusableError("the row is not an object", type(row).__name__)
    key = next((k for k in LIST_KEYS if row.get(k) is not None), None)
    if key is None:
        raise _UnusableError(f"no {' or '.join(LIST_KEYS)}", "keys " + ", ".join(map(repr, row)))
    messages = row[key]
    if not isinstance(messages, list):
        raise _UnusableError(f"{key} is not a list", type(messages).__name__)
    if not messages:
        raise _UnusableError("the conversation is empty")
    return messages


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise _UnusableError(
            "a message is not an object", f"message {number}: {type(message).__name__}"
        )
    fields = {k: v for k, v in message.items() if v is not None}
    role = fields.pop("role", fields.pop("from", None))
    content = fields.pop("content", fields.pop("value", None))
    if role is None:
        raise _UnusableError("a message has no role", f"message {number}")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise _UnusableError("unknown role", f"message {number}: {role!r}{hint}")
    if content is None and fields.get("tool_calls"):
        content = ""  # an assistant that only calls tools has null content in OpenAI's shape
    if content is None:
        raise _UnusableError("a message has no content", f"message {number} ({role})")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise _UnusableError("content is not text", f"message {number} ({role}): {kind}")
    return {"role": ROLES[role], "content": content, **fields}


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool definitions of a row; columnar files keep them as a JSON string."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise _UnusableError("tools is not valid JSON", error.msg) from error
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise _UnusableError("tools is not a list of objects")
    return tuple(tools)
