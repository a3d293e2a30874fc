"""Runs a suite over many wrong plugins, in one process, and tells which tests fail for each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from draftcore.testing import child_environment

RunSuites = Callable[[Mapping[str, str]], dict[str, set[str]]]


@pytest.fixture(scope="module")
def wrong_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wrong plugins lie; it is importable in the process that runs the suites."""
    return tmp_path_factory.mktemp("wrong")


@pytest.fixture(scope="module")
def run_suites(wrong_folder: Path) -> RunSuites:
    """Return the names of the tests that fail, by the name of the suite's source."""

    def run(sources: Mapping[str, str]) -> dict[str, set[str]]:
        for name, source in sources.items():
            (wrong_folder / f"test_{name}.py").write_text(source)
        (wrong_folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", wrong_folder],
            capture_output=True,
            text=True,
            cwd=wrong_folder,
            env=child_environment(),
        )
        failed: dict[str, set[str]] = {name: set() for name in sources}
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                file, _, test = line.partition(" ")[2].split(" - ")[0].split("::")
                failed[file.removeprefix("test_").removesuffix(".py")].add(test)
        assert " passed" in done.stdout, done.stdout + done.stderr
        return failed

    return run
