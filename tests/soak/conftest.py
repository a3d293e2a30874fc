"""Damage, lies and floods at random: the tests here take 20 of each kind, `nox -s soak` hundreds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Figures = Callable[[str, int, str], None]


@pytest.fixture
def cases() -> int:
    """How many of a kind are tried."""
    return int(os.environ.get("SOAK_CASES", "20"))


@pytest.fixture
def figures() -> Figures:
    """Record what was tried, how often, and what came of it; `nox -s soak` makes the docs' table of it."""

    def record(what: str, tried: int, found: str) -> None:
        if file := os.environ.get("SOAK_FIGURES"):
            with Path(file).open("a") as stream:
                stream.write(json.dumps([what, tried, found]) + "\n")

    return record
