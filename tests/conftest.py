"""Fixtures that several folders share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from draftcore_sdk.targets import tiny_target

Figures = Callable[[str, int, str], None]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


# ---------------------------------------------------------------- damage, lies and floods at random


@pytest.fixture
def cases() -> int:
    """How many of a kind are tried: 10 for a change, hundreds in `nox -s soak`."""
    return int(os.environ.get("SOAK_CASES", "10"))


@pytest.fixture
def figures() -> Figures:
    """Record what was tried, how often, and what came of it; `nox -s soak` makes the docs' table of it."""

    def record(what: str, tried: int, found: str) -> None:
        if file := os.environ.get("SOAK_FIGURES"):
            with Path(file).open("a") as stream:
                stream.write(json.dumps([what, tried, found]) + "\n")

    return record
