"""Tries the conformance suites on wrong plugins: each must be failed by the test that names its fault.

A file beside this one holds the `MUTANTS` of one suite: a right plugin as text, and a table of the
wrong ones. A line `== NAME: TEST` begins a wrong plugin and says by which test it must be caught, and
behind `: ` what that must say (`passes`: it is right in its own way, which TEST behind it shows, or all of
them); what follows makes the right plugin wrong. That is a patch, lines
of the right plugin's files that go (-), come (+) or stay, or else code, which stands behind the right
plugin's and defines names of it anew. Of its lines `OLD => NEW` replaces a text, `CLASS.METHOD(ARGUMENTS):`
overrides a method of a class (a property without brackets), and `CLASS(BASE).METHOD(ARGUMENTS):` derives
that class from another.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from draftcore_sdk.suite import Suite, child_environment

LIMIT = 240  # seconds for one test; none takes a tenth of it on two quiet cores
# A mutant that fails by one of these is not wrong but broken, or was not caught in time.
SLIPS: tuple[str, ...] = ("NameError", "SyntaxError", "IndentationError", "ImportError")
SLIPS += ("ModuleNotFoundError", "Failed: Timeout")
METHOD = re.compile(r"([A-Z]\w*)(?:\(([\w.]+)\))?\.(\w+)(?:\((.*?)\))?:(.*)")
TEST_FILE = """\
from pathlib import Path

import pytest
from {module} import {suite}

class TestSuite({suite}):
    {body}
"""

CONFTEST = """\
import subprocess

import pytest
from tests.forks import Popen

Popen.direct, subprocess.Popen = True, Popen  # what a suite starts need not import all anew

@pytest.fixture(autouse=True)
def what_never_comes_is_not_waited_for_long(request, monkeypatch):
    if {soon} and "is_right" not in request.node.nodeid:
        monkeypatch.setattr("draftcore_sdk.suite.Suite.limit", 10 * {soon})
        for name in ("draftcore_sdk.limits.SOON", "{module}.SOON"):
            monkeypatch.setattr(name, {soon}, raising=False)
"""


@dataclass(frozen=True)
class Mutant:
    """A plugin that differs from the right one of its kind by code or by a patch."""

    caught_by: str  # the test that must fail; '' where it is right
    change: str = ""
    says: str = ""  # in the first line of what it says
    passes: str = ""  # where it is right, the only test that is run

    @property
    def test(self) -> str:
        """The standard test, whichever case of it."""
        return self.caught_by.partition("[")[0]

    def applied(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the files of the right plugin, changed."""
        if self.change.startswith(("-", "+", " ")):
            return patched(files, self.change)
        files, inside = dict(files), ""
        file = next(iter(files))
        for line in self.change.split("\n"):
            old, edit, new = line.partition(" => ")
            if edit:
                files = replaced(files, old, new)
            elif head := METHOD.match(line):
                name, base, method, given, rest = head.groups()
                if name != inside:
                    defined = re.compile(rf"class {name}\b")
                    file = next((path for path in files if defined.search(files[path])), file)
                    files[file] += f"\nclass {name}({base or name}):\n"
                mark = "@property\n    " * (given is None)
                files[file] += f"    {mark}def {method}(self, {given or ''}):{rest}\n"
                inside = name
            else:
                inside *= line[:1] in ("", " ")
                files[file] += "    " * bool(inside) + f"{line}\n"
        return files


def replaced(files: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """Return files with a text in place of another."""
    assert old in "\n".join([*files, *files.values()]), f"the right plugin has no {old!r}"
    return {path.replace(old, new): text.replace(old, new) for path, text in files.items()}


def patched(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """Return files with lines that come (+), go (-) or stay, in hunks."""
    for hunk in patch.split("\n\n"):
        lines = hunk.strip("\n").split("\n")
        old, new = ("\n".join(x[1:] for x in lines if x[0] in f" {sign}") for sign in "-+")
        files = replaced(files, old, new)
    return dict(files)


def wrong(table: str) -> dict[str, Mutant]:
    """Read a table of wrong plugins, by name."""
    found = {}
    for entry in table.split("\n== ")[1:]:
        head, _, change = entry.partition("\n")
        name, test, says = f"{head}: : ".split(": ")[:3]
        right, passes = test.startswith("passes"), test.removeprefix("passes").strip()
        found[name] = Mutant("" if right else test, change.rstrip(), says, passes * right)
    return found


def one_file(text: str) -> dict[str, str]:
    """Return the file of a right plugin, whose last lines are its only offer and how it is opened."""
    source, offer, opened = text.rstrip().split("\n== ")
    hook, _, made = opened.partition(": ")
    source = f"""
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
{source}

@hookimpl
def describe():
    return [{offer}]

@hookimpl
def {hook}:
    return {made}
"""
    return {"{name}.py": source}


@dataclass(frozen=True)
class Mutants:
    """A suite, a right plugin that passes it, and plugins that do not."""

    suite: type[Suite]
    right: Mapping[str, str]  # its files, the plugin's module first; {name} is the plugin's name
    wrong: dict[str, Mutant]  # by the plugin's name
    body: str = 'plugin = "{name}"'  # what the subclass of the suite says
    every_test: bool = True  # each test of the suite catches a mutant
    soon: float = 0.0  # seconds for which the suite waits for what a wrong plugin never does

    @property
    def parted(self) -> tuple[list[str], list[str]]:
        """Return the names of what every change tries, and of what is left.

        The right plugin, and of each standard test the first that it catches.
        """
        first = {mutant.test: name for name, mutant in reversed(self.wrong.items())}
        chosen = ["is_right", *(name for name in self.wrong if name in first.values())]
        return chosen, [name for name in self.wrong if name not in chosen]

    def complaints(self, folder: Path, names: Sequence[str]) -> list[str]:
        """Run a right plugin through the whole suite, and each wrong one through its test.

        One process runs all. Returns what is not as it should be; of a test, pytest's line on it.
        """
        plugins = {name: self.wrong.get(name, Mutant("")) for name in names}
        tests = [self._write(name, mutant, folder) for name, mutant in plugins.items()]
        (folder / "pytest.ini").write_text(f"[pytest]\ntimeout = {LIMIT}\n")
        (folder / "conftest.py").write_text(
            CONFTEST.replace("{module}", self.suite.__module__).replace("{soon}", str(self.soon))
        )
        flags = ("-q", "--tb=no", "-rpfE", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *tests],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**child_environment(), "COLUMNS": "1000"},  # lines are not cut
        )
        lines = {test: list[str]() for test in tests}
        for line in done.stdout.splitlines():
            if line.startswith(("PASSED ", "FAILED ", "ERROR ")):
                test = line.partition(" ")[2].split(" - ")[0]
                lines[test if test in lines else test.partition("::")[0]].append(line)
        found = []
        for test, mutant in zip(tests, plugins.values(), strict=True):
            passed = [line.startswith("PASSED ") for line in lines[test]]
            slipped = any(f" - {slip}" in line for line in lines[test] for slip in SLIPS)
            slipped |= not all(mutant.says in line for line in lines[test])
            if not passed or (any(passed) or slipped if mutant.caught_by else not all(passed)):
                wanted = "PASSED " if mutant.caught_by else ("FAILED ", "ERROR ")
                odd = [line for line in lines[test] if slipped or line.startswith(wanted)]
                found.append(f"{test}: {odd or done.stdout + done.stderr}")
        return found

    def _write(self, name: str, mutant: Mutant, folder: Path) -> str:
        """Write a plugin and the test file of its suite; return what pytest is to run."""
        body = dedent(self.body).strip().replace("\n", "\n    ")
        module, suite = self.suite.__module__, self.suite.__name__
        files = Mutant("", dedent(mutant.change)).applied(self.right)
        files["test_{name}.py"] = TEST_FILE.replace("{module}", module).replace("{suite}", suite)
        files["test_{name}.py"] = files["test_{name}.py"].replace("{body}", body)
        for path, text in files.items():
            file = folder / path.replace("{name}", name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.replace("{name}", name))
        test = mutant.caught_by or mutant.passes
        return f"test_{name}.py" + (f"::TestSuite::{test}" if test else "")
