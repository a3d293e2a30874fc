"""What our own distributions offer, installed or not, and who owns each name: `catalog.toml`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

BUILT_IN = "(built in)"  # how the dist draftcore itself is shown


@functools.cache
def _catalog() -> dict[str, dict[str, str]]:
    import tomllib  # 5 ms: only where something is selected

    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text())
    return {
        kind: {name: BUILT_IN if dist == "draftcore" else dist for name, dist in names.items()}
        for kind, names in data.items()
    }


def owners(kind: str) -> dict[str, str]:
    """Return our dist of each name of a kind, of each `verb`, or of each `kind` that a dist brings."""
    return _catalog().get(kind, {})


def default(kind: str) -> str:
    """Return the name of a kind that a run takes where it names none."""
    return _catalog()["defaults"][kind]


def defaults() -> set[str]:
    """Return our dists of what a run takes that names nothing: the extra `standard` brings them."""
    return {owners(kind)[name] for kind, name in _catalog()["defaults"].items()}


def dists() -> set[str]:
    """Return our dists, which own their names."""
    kinds = (names for kind, names in _catalog().items() if kind != "defaults")
    return {BUILT_IN, *(dist for names in kinds for dist in names.values())}
