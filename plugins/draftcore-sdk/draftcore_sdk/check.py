"""Run the suites that apply to a plugin, and report on them in words.

pytest gets a process of its own, whatever a plugin does to it, and sees nothing of the user's
project: no conftest, no settings, no pytest plugins. Each suite becomes a test file of two lines
in a temporary folder; `reporter` sends back a JSON line per test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import pytest

from draftcore.contracts.offers import Offer
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.listing import from_here
from draftcore.options import apply_overrides
from draftcore.plugins.binding import bind
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry
from draftcore_sdk.suite import Suite, child_environment

SUITE_OF = {
    "plugin": "plugins:PluginSuite",
    "algorithm": "algorithms:AlgorithmSuite",
    "capture": "captures:CaptureSuite",
    "store": "stores:StoreSuite",
    "channel": "channels:ChannelSuite",
    "runner": "runners:RunnerSuite",
    "graph": "graphs:GraphBackendSuite",
    "graph-plugin": "graph_plugins:GraphPluginSuite",
}
# What is shown of several cases of one test is the first of these.
SHOWN = {"failed": "FAIL", "xfailed": "xfail", "passed": "ok", "skipped": "skipped"}
ESSENTIAL = 8  # lines of a failed assertion; --traceback shows all


@dataclass(frozen=True)
class Check:
    """One suite for one plugin; `offer` is '' for the plugin's own."""

    kind: str
    offer: str
    plugin: str
    loose: str
    options: Mapping[str, Any]
    uri: str

    @property
    def title(self) -> str:
        return f"{self.kind} {self.offer}".strip()


def suites_of(plugin: Plugin, overrides: Sequence[str], uri: str | None) -> list[Check]:
    """Return the checks of a plugin and of each of its offers.

    Raises UsageError for an option that no offer has or that its model refuses, and for a URI
    that belongs to no store or channel of the plugin.
    """
    stored = [o for o in plugin.offers if o.kind in ("store", "channel")]
    if uri is not None and uri.partition(":")[0] not in {offer.name for offer in stored}:
        names = ", ".join(f"{offer.kind} {offer.name}" for offer in stored) or "none"
        raise UsageError(
            f"--uri {uri} names no store or channel of {plugin}; it offers: {names}\n"
            "  a URI begins with the offer's name, as in NAME:{tmp}"
        )
    loose = plugin.dist if plugin.loose else ""
    checks = [Check("plugin", "", plugin.module, loose, {}, "")]
    for offer, options in options_by_offer(plugin, overrides).items():
        theirs = uri if uri and uri.partition(":")[0] == offer.name and offer in stored else ""
        checks.append(Check(offer.kind, offer.name, plugin.module, loose, options, theirs))
    return checks


def options_by_offer(plugin: Plugin, overrides: Sequence[str]) -> dict[Offer, dict[str, Any]]:
    """Give each option to the offers that have it, validated as a run does."""
    data: dict[str, Any] = {}
    apply_overrides(data, overrides)
    known = {offer: _option_names(offer) for offer in plugin.offers}
    names = sorted({name for names in known.values() for name in names})
    for key in data:
        if key not in names:
            raise UsageError(
                f"{plugin} has no option {key!r}{nearest(key, names)}\n"
                f"  options of its offers: {', '.join(names) or 'none'}"
            )
    chosen = {o: {key: data[key] for key in data if key in known[o]} for o in plugin.offers}
    for offer, options in chosen.items():
        if options:
            bind(Registry((plugin,)), offer.kind, offer.name).options(options)
    return chosen


def _option_names(offer: Offer) -> list[str]:
    module, _, name = offer.options.partition(":")
    try:
        return list(getattr(import_module(module), name).model_fields) if module else []
    except (ImportError, AttributeError):
        return []  # the plugin's own suite says so


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Result:
    """What became of one test, or of one case of a parametrised one."""

    check: int
    test: str
    case: str
    outcome: str
    seconds: float
    message: str = ""
    where: str = ""
    traceback: str = ""

    @property
    def words(self) -> str:
        return self.test.removeprefix("test_").replace("_", " ")


def run(checks: Sequence[Check], traceback: bool = False) -> Iterator[Result]:
    """Run the suites in a child process; yield each test's result as it ends.

    A child that dies is a failure of the test it was in. Raises DraftcoreError where pytest itself
    gives up.
    """
    with tempfile.TemporaryDirectory(prefix="draftcore-check-") as name:
        folder = Path(name)
        for number, check in enumerate(checks):
            spec = json.dumps(asdict(check), default=str)
            source = "from draftcore_sdk import check\n\n"
            source += f"TestSuite = check.suite(check.Check(**check.json.loads({spec!r})))\n"
            (folder / f"test_{number}.py").write_text(source)
        (folder / "pytest.ini").write_text("[pytest]\n")
        running = ""
        with open(folder / "log", "w+") as log, _child(folder, log, traceback) as (child, lines):
            for line in map(json.loads, lines):
                running = line.get("started", "")
                if not running:
                    yield _result(**line if traceback else {**line, "traceback": ""})
            status = child.wait()
            log.seek(0)
            if running:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                last = "\n".join(log.read().strip().splitlines()[-ESSENTIAL:])
                message = f"the process ended here with {how}\n{last}".strip()
                yield _result(running, "failed", 0.0, message)
            elif status not in (0, 1):
                raise DraftcoreError(f"pytest ended with status {status}\n{log.read().strip()}")


@contextmanager
def _child(
    folder: Path, log: IO[str], traceback: bool
) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Start pytest; its report comes through a pipe, as tests may print anywhere else."""
    read, write = os.pipe()
    command = [sys.executable, "-P", "-m", "pytest", "-p", "draftcore_sdk.reporter"]
    command += [f"--report-to={write}", "-c", str(folder / "pytest.ini"), f"--rootdir={folder}"]
    command += [f"--confcutdir={folder}", f"--basetemp={folder / 'tmp'}", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "--continue-on-collection-errors", "-vv"]
    # native is twice as quick where everything fails; of it only the message is shown
    command += ["--tb=long" if traceback else "--tb=native", str(folder)]
    # passive: spinning OpenMP threads are no use where another process wants the cores
    env = {"OMP_WAIT_POLICY": "PASSIVE", **child_environment()}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    with os.fdopen(read, encoding="utf-8") as lines:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env=env, pass_fds=[write], start_new_session=True
        )
        os.close(write)
        try:
            yield child, lines
        finally:
            if child.poll() is None:  # Ctrl-C: with the processes that a suite started
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def suite(check: Check) -> type[Suite]:
    """Make the test class of a check, as an author would write it. Called in the child."""
    module, _, name = SUITE_OF[check.kind].partition(":")
    base = getattr(import_module(f"draftcore_sdk.{module}"), name)
    said: dict[str, Any] = {"plugin": check.plugin, "name": check.offer, "options": check.options}
    said["loose"] = Path(check.loose) if check.loose else None

    @pytest.fixture
    def uri(self: Suite, tmp_path: Path) -> str:
        return check.uri.replace("{tmp}", str(tmp_path / "offer"))

    def by_hand(self: Suite, *arguments: Any) -> None:
        pytest.skip(f"only a test file can say how: a subclass of {name} with `{method}`")

    if check.uri:
        said[f"{check.kind}_uri"] = uri
    if method := {"store": "alter", "channel": "impatient"}.get(check.kind):
        said[method] = by_hand
    return type("TestSuite", (base,), said)


def _result(
    test: str, outcome: str, seconds: float, message: str = "", where: str = "", traceback: str = ""
) -> Result:
    """Take apart the node id `test_3.py::TestSuite::test_name[case]`."""
    match = re.match(r"test_(\d+)\.py(?:::\w+::(\w+)(?:\[(.*)\])?)?", test, re.DOTALL)
    assert match
    named = match[2] or "the suite can be loaded"
    return Result(int(match[1]), named, match[3] or "", outcome, seconds, message, where, traceback)


# ---------------------------------------------------------------- reporting


class Report:
    """The results of a plugin's checks, for people as they come and for machines at the end."""

    def __init__(self, plugin: Plugin, checks: Sequence[Check]) -> None:
        self.plugin, self.checks = plugin, checks
        self.results: list[Result] = []
        self.seconds = 0.0

    @property
    def failed(self) -> int:
        return self._counts()["failed"]

    def lines(self, results: Iterable[Result]) -> Iterator[str]:
        """Yield the report line by line, taking results as they come."""
        began = time.perf_counter()
        yield from_here(str(self.plugin))
        shown = -1
        for (number, _), cases in groupby(results, key=lambda result: (result.check, result.test)):
            found = list(cases)
            self.results += found
            if number != shown:
                yield from ("", self.checks[number].title)
                shown = number
            yield from test_lines(found)
        self.seconds = time.perf_counter() - began
        counts = ", ".join(f"{count} {word}" for word, count in self._counts().items() if count)
        yield from ("", f"{counts} in {self.seconds:.0f} s")

    def to_json(self) -> dict[str, Any]:
        """Return the finished report; `where` and `traceback` say more of a failure."""
        suites = [
            {
                "kind": check.kind,
                "offer": check.offer,
                "tests": [_test_data(r) for r in self.results if r.check == number],
            }
            for number, check in enumerate(self.checks)
        ]
        return {
            **{key: getattr(self.plugin, key) for key in ("name", "dist", "version", "module")},
            **self._counts(),
            "seconds": round(self.seconds, 1),
            "suites": suites,
        }

    def _counts(self) -> dict[str, int]:
        outcomes = [result.outcome for result in self.results]
        return {word: outcomes.count(word) for word in ("passed", "failed", "skipped", "xfailed")}


def test_lines(cases: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of one test: all its cases in one, and below it why it failed."""
    outcome = min((case.outcome for case in cases), key=list(SHOWN).index)
    alike = [case for case in cases if case.outcome == outcome]
    some = f"{len(alike)} of " if len(alike) < len(cases) else ""
    count = f" ({some}{len(cases)})" if len(cases) > 1 else ""
    reason = f": {alike[0].message}" if outcome in ("skipped", "xfailed") else ""
    yield f"  {SHOWN[outcome]:7}  {alike[0].words}{count}{reason}"
    if outcome == "failed":
        causes: dict[tuple[str, ...], list[str]] = {}
        for case in alike:
            causes.setdefault(explanation(case), []).append(case.case)
        for lines, names in causes.items():
            shown = [" ".join(f"[{name}]" for name in names if name), *lines]
            yield from (f"           {line}" for line in shown if line)


def explanation(case: Result) -> tuple[str, ...]:
    """Return the essential lines of a failure, or the traceback where there is one."""
    if case.traceback:
        return tuple(case.traceback.splitlines())
    lines = [line for line in case.message.splitlines() if line.strip()]
    known = next((at for at, line in enumerate(lines) if "Full diff:" in line), len(lines))
    cut = lines[: min(known, ESSENTIAL)]
    more = ["... (draftcore --traceback check-plugin shows all)"] * (len(cut) < len(lines))
    return (*cut, *more, *([f"at {case.where}"] if case.where else []))


def _test_data(result: Result) -> dict[str, Any]:
    data = {key: value for key, value in asdict(result).items() if value != "" and key != "check"}
    return {**data, "seconds": round(result.seconds, 3)}
