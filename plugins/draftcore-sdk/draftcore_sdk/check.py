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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.options import apply_overrides
from draftcore_sdk.internals import NEEDED, Plugin, Registry, bind, from_here, load_plugins
from draftcore_sdk.limits import HARD, LIMIT
from draftcore_sdk.suite import Suite, child_environment

SUITE_OF = {
    "plugin": "plugins:PluginSuite", "algorithm": "algorithms:AlgorithmSuite",
    "target": "targets:TargetSuite", "samples": "samples:SamplesSuite",
    "capture": "captures:CaptureSuite", "store": "stores:StoreSuite",
    "channel": "channels:ChannelSuite", "batches": "batches:BatchesSuite",
    "launcher": "launchers:LauncherSuite", "source": "sources:SourceSuite",
    "prompts": "prompts:PromptsSuite",
    "images": "images:ImageSuite", "runner": "runners:RunnerSuite",
    "graph": "graphs:GraphBackendSuite", "graph-plugin": "graph_plugins:GraphPluginSuite",
    "wrapper": "wrappers:WrapperSuite", "observer": "wrappers:ObserverSuite",
    "evaluation": "evaluations:EvaluationSuite", "engine": "engines:EngineSuite",
}  # fmt: skip
WRAPPED = {
    *("feature_request", "build_draft", "collate", "forward_loss", "optimizer", "schedule"),
    *("drafter", "export_draft", "import_draft"),
}
OBSERVED = {
    *("run_started", "gradients_ready", "step_finished", "eval_metrics", "evaluated"),
    *("checkpoint_saved", "run_finished"),
}
# What a wrapper of another kind's hook is tried around: the kind, and an offer of it.
AROUND: Mapping[str, tuple[Kind, str]] = {
    "target": ("target", "hf"), "samples": ("samples", "conversations"),
    "batches": ("batches", "queue"), "evaluation": ("evaluation", "decoding"),
    "capture": ("capture", "hf"), "feature_store": ("store", "file"),
    "channel": ("channel", "tcp"), "launcher": ("launcher", "local"), "engine": ("engine", "llamacpp"),
    "prompts": ("prompts", "own"), "source": ("source", "files"), "image_processor": ("images", "processor"),
    "runner": ("runner", "eager"), "graph_backend": ("graph", "recording"),
    "graph_plugin": ("graph-plugin", "tbo"),
}  # fmt: skip
UNASKED = "verb", "observer", "memory", "ranks"  # ours alone, or of the suites `plugin`, `observer`
UNTRIED = {"disagg_row", "build_disagg_draft_input", "read_export"}  # around an algorithm's
# What is shown of several cases of one test is the first of these.
SHOWN = {"failed": "FAIL", "xfailed": "xfail", "passed": "ok", "skipped": "skipped"}
ESSENTIAL = 8  # lines of a failed assertion; --traceback shows all


@dataclass(frozen=True)
class Check:
    """One suite for one plugin; `offer` is '' for the plugin's own. `shape` is an algorithm's target's."""

    kind: str
    offer: str
    plugin: str
    loose: str
    options: Mapping[str, Any]
    uri: str
    shape: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.options.items())
        wrapped = ", wrapped" * (" " in self.plugin)
        return f"{self.kind} {self.offer}".strip() + wrapped + f" ({said})" * bool(said)


def suites_of(
    plugin: Plugin, overrides: Sequence[str], uri: str | None, each: bool = False
) -> list[Check]:
    """Return the checks of a plugin, of each of its offers and of what it wraps and observes.

    Below the options that are given stand those that the plugin's `TRIED_WITH` has for the offer.
    With `each`, an offer is checked with every other value of a boolean or literal option, too.
    Raises UsageError for an option that no offer has or that its model refuses, and for a URI
    that belongs to no store, channel, source or prompt set of the plugin.
    """
    stored = [o for o in plugin.offers if o.kind in ("store", "channel", "source", "prompts")]
    if uri is not None and uri.partition(":")[0] not in {offer.name for offer in stored}:
        names = ", ".join(f"{offer.kind} {offer.name}" for offer in stored) or "none"
        raise UsageError(
            f"--uri {uri} names no store, channel, source or prompts of {plugin}; it offers: {names}\n"
            "  a URI begins with the offer's name, as in NAME:{tmp}"
        )
    loose = plugin.dist if plugin.loose else ""
    checks = [Check("plugin", "", plugin.module, loose, {}, "")]
    for offer, options in options_by_offer(plugin, overrides).items():
        theirs = uri if uri and uri.partition(":")[0] == offer.name and offer in stored else ""
        own = getattr(plugin.instance, "TRIED_WITH", {}).get(f"{offer.kind} {offer.name}", {})
        options, of_target = {**own.get("options", {}), **options}, own.get("shape")
        of_offer = offer.kind, offer.name, plugin.module, loose
        checks.append(Check(*of_offer, options, theirs, of_target))
        for name, value in variants(offer) if each else ():
            varied = {**options, name: value}
            with suppress(UsageError):  # a value that another option would have to go with
                bind(Registry((plugin,)), offer.kind, offer.name, varied)
                checks.append(Check(*of_offer, varied, theirs, of_target))
    for kind, hooks in {"wrapper": WRAPPED, "observer": OBSERVED}.items():
        if hooks & unoffered(plugin):
            checks.append(Check(kind, "", plugin.module, loose, {}, ""))
    for hook in [hook for hook in AROUND if hook in unoffered(plugin)]:
        kind, name = AROUND[hook]
        owner = load_plugins().find(kind, name).module
        checks.append(Check(kind, name, f"{owner} {plugin.module}", loose, {}, ""))
    return checks


def unoffered(plugin: Plugin) -> set[str]:
    """Return the hooks that a plugin wraps or observes, rather than answers for what it offers."""
    offered = {hook for o in plugin.offers if not o.implementation for hook in NEEDED[o.kind]}
    if "forward_loss" in offered:  # an algorithm of functions: they are all its own
        offered |= {*WRAPPED, *UNTRIED, "eval_metrics"}
    return {*plugin.hooks} - offered


def variants(offer: Offer) -> Iterator[tuple[str, Any]]:
    """Yield each boolean or literal option of an offer with each value but the default."""
    for name, field in options_model(offer).model_fields.items() if offer.options else ():
        inside = [field.annotation, *get_args(field.annotation)]
        values = [v for kind in inside if get_origin(kind) is Literal for v in get_args(kind)]
        values += [True, False] * (bool in inside)
        yield from ((name, value) for value in values if value != field.default)


def options_by_offer(plugin: Plugin, overrides: Sequence[str]) -> dict[Offer, dict[str, Any]]:
    """Give each option to the offers that have it, validated as a run does."""
    data: dict[str, Any] = {}
    apply_overrides(data, overrides)
    known = {offer: _option_names(offer) for offer in plugin.offers if offer.kind not in UNASKED}
    names = sorted({name for names in known.values() for name in names})
    for key in data:
        if key not in names:
            raise UsageError(
                f"{plugin} has no option {key!r}{nearest(key, names)}\n"
                f"  options of its offers: {', '.join(names) or 'none'}"
            )
    chosen = {o: {key: data[key] for key in data if key in known[o]} for o in known}
    for offer, options in chosen.items():
        if options:
            bind(Registry((plugin,)), offer.kind, offer.name, options)
    return chosen


def _option_names(offer: Offer) -> list[str]:
    return list(options_model(offer).model_fields) if offer.options else []


def options_model(offer: Offer) -> Any:
    """Return an offer's options model, an empty one where it cannot be imported."""
    module, _, name = offer.options.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return BaseModel  # the plugin's own suite says so


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
        return words(self.test)

    @property
    def cause(self) -> str:
        return self.message.partition("\n")[0]


def words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def run(
    checks: Sequence[Check], traceback: bool = False, flags: Sequence[str] = (),
    limit: float = LIMIT,
) -> Iterator[Result]:  # fmt: skip
    """Run the suites in a child process; yield each test as it begins, and its result as it ends.

    `flags` are those of `reporter`: `--quick`, `--only=TEST`. Raises UsageError where there is no such test.

    A test that takes `limit` seconds fails; so does one in which the child dies. Raises DraftcoreError
    where pytest itself gives up.
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
        flags = ["--tb=long" if traceback else "--tb=native", f"--limit={limit}", *flags]
        with open(folder / "log", "w+") as log, _child(folder, log, flags) as (child, lines):
            for line in map(json.loads, lines):
                if names := [words(name) for name in line.get("names", ())]:
                    listed = "\n  ".join(["there are:", *names])
                    raise UsageError(f"no test has these words in its name\n  {listed}")
                if "names" in line:  # none was collected, and the next line says why
                    continue
                running = line.get("started", "")
                if running:
                    message = "slow, so --quick leaves it out" * line["slow"]
                    yield _result(running, "running", 0.0, message=message)
                else:
                    yield _result(**line if traceback else {**line, "traceback": ""})
            status = child.wait()
            log.seek(0)
            said = log.read().strip()
            if running:
                yield _result(running, "failed", 0.0, message=_ended(status, said, limit))
            elif status not in (0, 1):
                raise DraftcoreError(f"pytest ended with status {status}\n{said}")


def _ended(status: int, said: str, limit: float) -> str:
    """Say how a process ended in the middle of a test."""
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    message, shown = f"the process ended here with {how}", said.splitlines()[-ESSENTIAL:]
    if threads := said.partition("Timeout (")[2].split("\n\n")[1:]:  # the main one comes last
        own = [line for line in threads[-1].splitlines()[1:] if "/pluggy/" not in line]
        message, shown = f"no end after {HARD * limit:.0f} s, here:", own[: ESSENTIAL - 2]
    return "\n".join([message, *shown, "what comes after it was not tested"])


@contextmanager
def _child(
    folder: Path, log: IO[str], flags: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Start pytest; its report comes through a pipe, as tests may print anywhere else.

    Through another one it notices that this process ends.
    """
    read, write = os.pipe()
    noticed, held = os.pipe()
    command = [sys.executable, "-P", "-m", "pytest", "-p", "draftcore_sdk.reporter", *flags]
    command += [f"--report-to={write}", f"--end-with={noticed}"]
    command += ["-c", str(folder / "pytest.ini"), f"--rootdir={folder}"]
    command += [f"--confcutdir={folder}", f"--basetemp={folder / 'tmp'}", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "--continue-on-collection-errors", "-vv"]
    command += [str(folder)]
    env = child_environment()
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    with os.fdopen(read, encoding="utf-8") as lines:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env=env, pass_fds=[write, noticed],
            start_new_session=True,
        )  # fmt: skip
        os.close(write)
        os.close(noticed)
        try:
            yield child, lines
        finally:
            os.close(held)
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

    if check.uri:
        said[f"{check.kind}_uri"] = uri
    if check.shape:
        said["shape"] = check.shape
    if check.kind == "batches" and " " in check.plugin:  # around the queue
        said["producing"] = lambda self, file, loose: self.by_producers(file, loose)
    return type("TestSuite", (base,), said)


def _result(test: str, outcome: str, seconds: float, **why: str) -> Result:
    """Take apart the node id `test_3.py::TestSuite::test_name[case]`."""
    match = re.match(r"test_(\d+)\.py(?:::\w+::(\w+)(?:\[(.*)\])?)?", test, re.DOTALL)
    assert match
    named = match[2] or "the suite can be loaded"
    return Result(int(match[1]), named, match[3] or "", outcome, seconds, **why)


# ---------------------------------------------------------------- reporting


class Report:
    """The results of a plugin's checks, for people as they come and for machines at the end."""

    def __init__(self, plugin: Plugin, checks: Sequence[Check]) -> None:
        self.plugin, self.checks = plugin, checks
        self.results: list[Result] = []
        self.running: Result | None = None
        self.seconds = 0.0

    @property
    def failed(self) -> int:
        return self._counts()["failed"]

    @property
    def untried(self) -> list[str]:
        return sorted(UNTRIED & unoffered(self.plugin))

    def lines(self, results: Iterable[Result]) -> Iterator[str]:
        """Yield the report line by line, taking results as they come."""
        began = time.perf_counter()
        yield from_here(str(self.plugin))
        for number, tests in groupby(results, key=lambda result: result.check):
            yield from ("", self.checks[number].title)
            failed: list[Result] = []
            for _, cases in groupby(tests, key=lambda result: result.test):
                found = []
                for case in cases:
                    if self._ended(case):
                        found.append(case)
                    elif case.message and not found:
                        yield f"  ...      {case.words}: {case.message}"
                self.results += found
                wrong = [case for case in found if case.outcome == "failed"]
                failed += [] if any(case.traceback for case in wrong) else wrong[:1]
                if not wrong or wrong[0] in failed[:1] or wrong[0].traceback:
                    yield from test_lines(found)
            yield from further(failed)
        self.seconds = time.perf_counter() - began
        counts = ", ".join(f"{count} {word}" for word, count in self._counts().items() if count)
        yield from ("", f"{counts} in {self.seconds:.0f} s")
        if self.untried:
            yield f"not tried, so test it yourself: a wrapper of {', '.join(self.untried)}"

    def _ended(self, case: Result) -> bool:
        """Note which test is running, and say whether it is one that has ended."""
        self.running = case if case.outcome == "running" else None
        return self.running is None

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
            **self._counts(), "untried": self.untried, "seconds": round(self.seconds, 1),
            "suites": suites,
        }  # fmt: skip

    def _counts(self) -> dict[str, int]:
        outcomes = [result.outcome for result in self.results]
        return {word: outcomes.count(word) for word in ("passed", "failed", "skipped", "xfailed")}


def test_lines(cases: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of one test: all its cases in one, and below it why it failed."""
    outcome = min((case.outcome for case in cases), key=list(SHOWN).index)
    alike = [case for case in cases if case.outcome == outcome]
    some = f"{len(alike)} of " if len(alike) < len(cases) else ""
    count = f" ({some}{len(cases)})" if len(cases) > 1 else ""
    reason = f": {alike[0].message}" if outcome != "failed" and alike[0].message else ""
    yield f"  {SHOWN[outcome]:7}  {alike[0].words}{count}{reason}"
    if outcome == "failed":
        causes: dict[tuple[str, ...], list[str]] = {}
        for case in alike:
            causes.setdefault(explanation(case), []).append(case.case)
        for lines, names in causes.items():
            shown = [" ".join(f"[{name}]" for name in names if name), *lines]
            yield from (f"           {line}" for line in shown if line)


def further(failed: Sequence[Result]) -> Iterator[str]:
    """Yield the tests of a suite that failed after the first, with the first line of what they say.

    One fault fails many tests; the first is the most basic one, and was explained.
    """
    if failed[1:]:
        yield f"  FAIL     {len(failed) - 1} more, perhaps of the same cause:"
    causes: dict[str, list[str]] = {failed[0].cause: []} if failed else {}
    for case in failed[1:]:
        causes.setdefault(case.cause, []).append(case.words)
    for number, (cause, tests) in enumerate(causes.items()):
        yield from [f"           {'; '.join(tests)}"] * bool(tests)
        yield from [f"             {cause}"] * bool(tests and number)


def explanation(case: Result) -> tuple[str, ...]:
    """Return the essential lines of a failure, or the traceback where there is one."""
    if case.traceback:
        return tuple(case.traceback.splitlines())
    lines = [line for line in case.message.splitlines() if line.strip()]
    bare = [at for at, line in enumerate(lines) if at and line.startswith("assert ")]
    lines = lines[: bare[0]] if bare else lines  # what is compared, where words say it
    known = next((at for at, line in enumerate(lines) if "Full diff:" in line), len(lines))
    cut = lines[: min(known, ESSENTIAL)]
    more = ["... (draftcore --traceback check-plugin shows all)"] * (len(cut) < len(lines))
    return (*cut, *more, *([f"at {case.where}"] if case.where else []))


def _test_data(result: Result) -> dict[str, Any]:
    data = {key: value for key, value in asdict(result).items() if value != "" and key != "check"}
    return {**data, "seconds": round(result.seconds, 3)}
