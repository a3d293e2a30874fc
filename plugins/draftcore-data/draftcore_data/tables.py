"""The source `hf`: tables that the library `datasets` reads, on this machine or from the Hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftcore.errors import UsageError, nearest
from draftcore.files import regular
from draftcore.uris import parse_options
from draftcore_data.lines import content_key
from draftcore_data.source import ROW_KEYS


@dataclass(frozen=True)
class Table:
    """The rows of a table, each named by its place from 0."""

    name: str
    files: Sequence[Path]  # that hold the rows, where they are local
    table: Any
    unread: Sequence[str]  # columns that it leaves out

    def key(self) -> str:
        if not self.files:
            return str(self.table._fingerprint)
        return content_key(self.files)

    def rows(self) -> Iterator[tuple[str, Any]]:
        there = dict.fromkeys(self.unread, "a column that is not read")
        return ((f"{self.name}:{at}", {**there, **row}) for at, row in enumerate(self.table))


def open_table(uri: str) -> Table:
    """Open `hf:org/name?split=train&config=...&revision=...`, or a parquet file, or a folder of them.

    A folder may also be one that `datasets` saved. Raises `UsageError` for what cannot be opened.
    """
    name, _, query = uri.removeprefix("hf:").partition("?")
    path, options = Path(name).expanduser(), parse_options(uri, query, KNOWN)
    if path.exists():
        files = _files(path, options.get("split"))
        # Streamed: loading them would first copy them into a cache.
        given = {"data_files": list(map(str, files)), "split": "train", "streaming": True}
        return _load(uri, path.name, files, {"path": files[0].suffix[1:], **given})
    if "://" in name:
        given = {"data_files": name, "split": "train", "streaming": True}
        return _load(uri, path.name, [], {"path": path.suffix[1:], **given})
    given = {"path": name, "name": options.pop("config", None), "split": "train", **options}
    return _load(uri, f"{name}[{given['split']}]", [], given)


KNOWN = ("split", "config", "revision")


def _files(path: Path, split: str | None) -> list[Path]:
    """Return the files of a table, or those of its split: train-00000.parquet, train/data-0.arrow."""
    # What `datasets` saves is called data-*.arrow or dataset.arrow; cache-*.arrow is something else.
    found = itertools.chain(path.rglob("*.parquet"), path.rglob("data*.arrow"))
    files = list(map(regular, [path] if path.is_file() else sorted(found)))
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
        there = ", ".join(str(file.relative_to(path)) for file in files) or "none"
        raise UsageError(f"{path} has no {what}\n  its tables: {there}")
    return chosen


def _load(uri: str, name: str, files: Sequence[Path], options: Mapping[str, Any]) -> Table:
    """Open what `datasets.load_dataset` reads, but for columns of images and sounds, slow to decode."""
    import datasets  # a second to import

    try:
        table = datasets.load_dataset(**options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"cannot load the dataset {uri}, split {options['split']}\n"
            f"  {type(error).__name__}: {error}\n"
            "  check the name, ?split= and &config=; a private one needs `hf auth login`"
        ) from error
    decoded = [
        column
        for column, feature in (table.features or {}).items()
        if column not in ROW_KEYS and datasets.features.features.require_decoding(feature)
    ]
    return Table(name, files, table.remove_columns(decoded) if decoded else table, decoded)
