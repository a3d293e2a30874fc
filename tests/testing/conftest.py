"""Runs a suite over many wrong plugins, in one process: for each the test that must catch it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from draftcore.testing import child_environment

RunSuites = Callable[[Mapping[str, tuple[str, str]]], dict[str, set[str]]]


@pytest.fixture(scope="module")
def wrong_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wrong plugins lie; it is importable in the process that runs the suites."""
    return tmp_path_factory.mktemp("wrong")


@pytest.fixture(scope="module")
def run_suites(wrong_folder: Path) -> RunSuites:
    """Run suites, each given by its source and the one test to run, '' for all of them.

    Returns the names of the tests that failed, by the suites' names.
    """

    def run(suites: Mapping[str, tuple[str, str]]) -> dict[str, set[str]]:
        for name, (source, _) in suites.items():
            (wrong_folder / f"test_{name}.py").write_text(source)
        (wrong_folder / "pytest.ini").write_text("[pytest]\n")
        tests = [
            f"test_{name}.py" + (f"::TestSuite::{test}" if test else "")
            for name, (_, test) in suites.items()
        ]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            capture_output=True,
            text=True,
            cwd=wrong_folder,
            env=child_environment(),
        )
        failed: dict[str, set[str]] = {name: set() for name in suites}
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                file, _, test = line.partition(" ")[2].split(" - ")[0].split("::")
                failed[file.removeprefix("test_").removesuffix(".py")].add(test)
        assert " passed" in done.stdout, done.stdout + done.stderr
        return failed

    return run
