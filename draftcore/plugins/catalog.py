"""What our own distributions offer, installed or not, and who owns each name: `catalog.toml`."""

from __future__ import annotations

import functools
from pathlib import Path

CORE = "draftcore"  # the dist


@functools.cache
def _catalog() -> dict[str, dict[str, str]]:
    import tomllib  # 5 ms: only where something is selected

    return tomllib.loads(Path(__file__).with_name("catalog.toml").read_text())


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
    return {dist for kind in _catalog().keys() - {"defaults"} for dist in owners(kind).values()}
