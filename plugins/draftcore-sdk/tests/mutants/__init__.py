"""Tries the conformance suites on wrong plugins: each must be failed by the test that names its fault.

A file beside this one holds the `Mutants` of one suite: a right plugin as text, and what is wrong
with each wrong one. `test_suites_catch.py` asserts what became of them.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from draftcore_sdk.suite import Suite, child_environment

TEST_FILE = """\
from pathlib import Path

import pytest
from {module} import {suite}

class TestSuite({suite}):
"""


@dataclass(frozen=True)
class Mutant:
    """A plugin that differs from the right one of its kind.

    `change` is code that stands behind the right plugin's and defines names of it anew; or it says
    for parts of the right plugin's text, which may lie in any file, what stands there instead.
    """

    caught_by: str  # the test that must fail; '' where the plugin is right in its own way
    change: str | Mapping[str, str] = ""


@dataclass(frozen=True)
class Mutants:
    """A suite, a right plugin that passes it, and plugins that do not."""

    suite: type[Suite]
    right: Mapping[str, str]  # its files, the plugin's module first; {name} is the plugin's name
    wrong: Mapping[str, Mutant]  # by the plugin's name
    body: str = 'plugin = "{name}"'  # what the subclass of the suite says
    every_test: bool = True  # each test of the suite catches a mutant
    apart: bool = False  # a process for each plugin, as the mutants patch what others use
    right_runs: str = ""  # the one test that the right plugin is run through; all if empty

    @property
    def plugins(self) -> Mapping[str, Mutant]:
        return {"is_right": Mutant(""), **self.wrong}

    def write(self, name: str, mutant: Mutant, folder: Path) -> str:
        """Write a plugin and the test file of its suite; return what pytest is to run."""
        files = dict(self.right)
        if isinstance(mutant.change, str):
            files[next(iter(files))] += dedent(mutant.change)
        else:
            for old, new in mutant.change.items():
                before = files
                files = {at.replace(old, new): text.replace(old, new) for at, text in files.items()}
                assert files != before, f"{name}: the right plugin has no {old!r}"
        head = TEST_FILE.format(module=self.suite.__module__, suite=self.suite.__name__)
        body = dedent(self.body).strip().replace("\n", "\n    ")
        files["test_{name}.py"] = f"{head}    {body}\n"
        for path, text in files.items():
            file = folder / path.replace("{name}", name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.replace("{name}", name))
        test = mutant.caught_by or self.right_runs
        return f"test_{name}.py" + (f"::TestSuite::{test}" if test else "")

    def run(self, folder: Path) -> dict[str, dict[str, str]]:
        """Run the right plugin through the whole suite, and each wrong one through its test.

        Returns pytest's line on each test, such as 'FAILED ... - StoreError: ...', by plugin.
        """
        tests = [self.write(name, mutant, folder) for name, mutant in self.plugins.items()]
        (folder / "pytest.ini").write_text("[pytest]\n")
        jobs = [[test] for test in tests] if self.apart else [tests]
        with ThreadPoolExecutor(4) as pool:  # who is alone mostly waits
            printed = list(pool.map(lambda at: _pytest(folder, at, jobs[at]), range(len(jobs))))
        found: dict[str, dict[str, str]] = {name: {} for name in self.plugins}
        for line in "\n".join(printed).splitlines():
            if line.startswith(("PASSED ", "FAILED ", "ERROR ")) and "::" in line:
                file, _, test = line.partition(" ")[2].split(" - ")[0].split("::")
                found[file.removeprefix("test_").removesuffix(".py")].setdefault(test, line)
        found["is_right"] = found["is_right"] or {"": "\n".join(printed)}  # says why nothing ran
        return found


def _pytest(folder: Path, at: int, tests: Sequence[str]) -> str:
    """Run tests in a process and a temporary folder of their own; return what it prints."""
    flags = ("-q", "--tb=no", "-rpfE", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp-{at}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**child_environment(), "COLUMNS": "1000"},  # lines are not cut
    )
    return done.stdout + done.stderr
