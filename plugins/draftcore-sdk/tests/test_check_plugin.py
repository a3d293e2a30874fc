"""`draftcore check-plugin` reports on the suites that apply in words, as data, and exits by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner, Result
from draftcore_sdk import check
from draftcore_sdk.internals import NEEDED, Plugin, hooks, load_plugins, main
from draftcore_sdk.limits import HARD
from draftcore_sdk.suite import child_environment
from importlib_metadata import version

PLAIN = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
@hookimpl
def commands(): return []
"""
SILENT_VERB = """
import click
@click.command()
def greet(): ...
@hookimpl
def commands(): return [greet]
"""
GRAPHS = """
@hookimpl
def describe(): return [Offer("graph-plugin", "mine")]
@hookimpl
def graph_plugin(name, options): {body}
"""
LAUNCHER = """
@hookimpl
def describe(): return [Offer("launcher", "mine")]
@hookimpl
def launcher(): ...
"""
WRAPPERS = """
@hookimpl(wrapper=True)
def graph_backend(name):
    found = yield
    found.can_run = lambda batch, key: True
    return found
@hookimpl(wrapper=True)
def read_export(folder): return (yield)
"""
OFFERS = """
from draftcore.errors import UsageError
@hookimpl
def describe():
    runner = Offer("runner", "mine", options="{module}_options:Options")
    return [Offer("channel", "other"), runner, Offer("store", "mine")]
@hookimpl
def channel(name): ...
@hookimpl
def runner(name, options): raise UsageError(f"width={options.width} mode={options.mode}")
@hookimpl
def feature_store(name, uri): raise UsageError(f"uri={uri}")
"""
OPTIONS = """
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field, model_validator
class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: float = Field(1.0, gt=0, description="how wide")
    mode: Literal["plain", "odd"] | None = Field(None, description="how")
    tied: bool = Field(False, description="tied; not when odd")
    free: bool = Field(True, description="free; without it tied")
    @model_validator(mode="after")
    def fits(self):
        assert self.free or self.tied
        return self
"""


class Loose:
    """A one-file plugin that is not installed, and its check."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.file = name, folder / f"{name}.py"
        (folder / f"{name}_options.py").write_text(OPTIONS)
        self.write("")

    def write(self, source: str, body: str = "") -> None:
        filled = source.replace("{module}", self.name).replace("{body}", body)
        self.file.write_text(PLAIN + dedent(filled))

    def check(self, *arguments: str, traceback: bool = False) -> Result:
        shell = ["--plugin", str(self.file), *["--traceback"] * traceback]
        return CliRunner().invoke(main, [*shell, "check-plugin", self.name, *arguments])

    @property
    def plugin(self) -> Plugin:
        return load_plugins(files=[self.file]).named(self.name)


@pytest.fixture
def loose(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Any) -> Iterator[Loose]:
    """Each test's plugin has a name of its own, as modules are imported once."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"mine_{abs(hash(request.node.name))}"
    yield Loose(tmp_path, name)
    sys.modules.pop(name, None)


def test_a_good_plugin_passes_with_a_line_per_test_and_a_sum() -> None:
    """The process that reports imports no torch."""
    program = (
        "import sys, draftcore.cli as cli\n"
        "cli.main(['check-plugin', 'sdk'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    command, environment = [sys.executable, "-c", program], child_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    title = f"sdk (draftcore-sdk {version('draftcore-sdk')})"
    assert lines[:4] == [title, "", "plugin", "  ok       it is listed as ready"]
    assert "  ok       its verbs clash with none" in lines
    ok, skipped = (sum(line.startswith(f"  {w}") for line in lines) for w in ("ok", "skipped"))
    assert lines[-1].startswith(f"{ok} passed, {skipped} skipped in ")


def test_a_failure_is_explained_in_essential_lines_and_status_1(loose: Loose) -> None:
    loose.write(SILENT_VERB)
    result = loose.check()
    lines = result.output.splitlines()
    at = lines.index("  FAIL     its verbs have help")
    assert lines[at + 1] == "           without a docstring: greet"
    assert "Traceback" not in result.output
    assert "def test_" not in result.output
    assert ", 1 failed, " in lines[-1]
    assert result.exit_code == 1


def test_the_report_as_data_and_with_tracebacks(loose: Loose) -> None:
    loose.write(SILENT_VERB)
    result = loose.check("--json", traceback=True)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["name"], report["dist"], report["failed"]) == (loose.name, str(loose.file), 1)
    (suite,) = report["suites"]
    assert (suite["kind"], suite["offer"]) == ("plugin", "")
    (failed,) = [test for test in suite["tests"] if test["outcome"] == "failed"]
    assert failed["test"] == "test_its_verbs_have_help"
    assert failed["message"].startswith("without a docstring: greet")
    assert "draftcore_sdk/plugins.py:" in failed["where"]
    assert "def test_its_verbs_have_help(" in failed["traceback"]
    assert report["passed"] + report["failed"] + report["skipped"] == len(suite["tests"])


def test_there_is_a_suite_for_every_kind() -> None:
    load_plugins().bring()
    kinds = {*NEEDED} - {*check.UNASKED}
    assert check.SUITE_OF.keys() == {"plugin", "wrapper", "observer", *kinds}
    assert {"algorithm", *(kind for kind, *_ in check.AROUND.values())} == kinds
    known = check.WRAPPED | check.OBSERVED | check.UNTRIED | check.AROUND.keys()
    assert known == {*hooks()} - {"describe", "commands", "ranks", "launch", "step_memory"}


def test_each_offer_is_judged_by_the_suite_of_its_kind(loose: Loose) -> None:
    loose.write(GRAPHS, "return object()")
    result = loose.check()
    assert result.exit_code == 1
    plugins, report = result.output.split("graph-plugin mine\n")
    assert "plugin\n  ok       it is listed as ready\n" in plugins
    assert report.count("FAIL") == 2
    assert report.count("DraftcoreError: the hook graph_plugin of ") == 1
    assert " more, perhaps of the same cause:\n           an error of the work" in report
    assert "; a replay waits for no device" in report


def test_a_wrapper_is_tried_around_what_is_there_and_what_is_not_tried_is_said(
    loose: Loose,
) -> None:
    loose.write(WRAPPERS)
    result = loose.check()
    assert result.exit_code == 1
    plugins, report = result.output.split("graph recording, wrapped\n")
    assert "FAIL" not in plugins
    assert "FAIL     what was not captured cannot run\n" in report
    assert report.endswith("\nnot tried, so test it yourself: a wrapper of read_export\n")


def test_a_part_of_the_tests_is_run_and_a_slow_one_is_announced_or_left_out(loose: Loose) -> None:
    loose.write(LAUNCHER)
    slow = "nothing is left of a run that ended"
    lines = loose.check("--only", "nothing is left").output.splitlines()[1:5]
    announced = f"  ...      {slow}: slow, so --quick leaves it out"
    assert lines == ["", "launcher mine", announced, f"  FAIL     {slow}"]
    quick = loose.check("--quick", "--only", "test_nothing_is_left").output
    assert f"  skipped  {slow}: slow, left out by --quick\n" in quick
    none = loose.check("--only", "nothing is right")
    assert none.exit_code == 2
    assert "in its name\n  there are:\n  it is listed as ready\n" in none.stderr
    assert f"\n  {slow}\n" in none.stderr


def test_cases_of_one_test_are_one_line_and_the_worst_is_shown() -> None:
    def case(outcome: str, case: str = "", **more: str) -> check.Result:
        return check.Result(0, "test_a_round_trip_is_exact", case, outcome, 0.0, **more)

    long = "assert 1 == 2\n" + "more\n" * 20
    ok, none = case("passed", "bfloat16"), case("skipped", "int64", message="none here")
    bad = [case("failed", name, message=long, where="x.py:3") for name in ("bool", "int8")]
    other = case("failed", "int16", message="assert [1] == [2]\n\n  Full diff:\n  + 1")
    more = "... (draftcore --traceback check-plugin shows all)"
    assert [line.strip() for line in check.test_lines([ok, *bad, other, none])] == [
        *("FAIL     a round trip is exact (3 of 5)", "[bool] [int8]", "assert 1 == 2"),
        *(*["more"] * 7, more, "at x.py:3", "[int16]", "assert [1] == [2]", more),
    ]
    assert list(check.test_lines([ok, none])) == ["  ok       a round trip is exact (1 of 2)"]
    assert list(check.test_lines([none])) == ["  skipped  a round trip is exact: none here"]
    later = list(check.test_lines([case("xfailed", message="later")]))
    assert later == ["  xfail    a round trip is exact: later"]


def test_a_plugin_that_is_not_there_or_broken_is_refused_with_the_reason(loose: Loose) -> None:
    loose.write("import surely_missing")
    result = loose.check()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is broken: ModuleNotFoundError: No module named 'surely_missing'" in result.stderr
    result = CliRunner().invoke(main, ["check-plugin", "buildin"])
    assert result.exit_code == 2
    assert "there is no plugin 'buildin' (did you mean 'builtin'?)" in result.stderr
    result = CliRunner().invoke(main, ["check-plugin", "./mine.py"])
    assert result.stderr.endswith("\n  draftcore --plugin ./mine.py check-plugin mine\n")


def test_options_and_uri_reach_the_offers_that_they_are_for(loose: Loose) -> None:
    """Options that are given stand above those that the plugin is tried with."""
    own = {"options": {"width": 2.0, "tied": True}, "shape": {"family": "gpt2"}}
    loose.write(f"{OFFERS}TRIED_WITH = {{'runner mine': {own}}}")
    checks = check.suites_of(loose.plugin, ["width=3e-1"], "mine:here{tmp}?a=1")
    assert [(c.kind, c.offer, c.options, c.uri, c.shape) for c in checks] == [
        *(("plugin", "", {}, "", None), ("channel", "other", {}, "", None)),
        ("runner", "mine", {"width": 0.3, "tied": True}, "", own["shape"]),
        ("store", "mine", {}, "mine:here{tmp}?a=1", None),
    ]
    found = {one.message for one in check.run(checks[2:]) if one.outcome == "failed"}
    assert any(message.endswith("width=0.3 mode=None") for message in found)
    opened = [message for message in found if "uri=mine:here/" in message]
    assert opened
    assert not any("{tmp}" in message for message in opened)


def test_each_value_of_a_literal_or_boolean_option_is_tried_once(loose: Loose) -> None:
    """But for values that the options' own model refuses beside the others' defaults."""
    loose.write(OFFERS)
    checks = check.suites_of(loose.plugin, ["width=2"], None, each=True)
    varied = ["", ", mode=plain", ", mode=odd", ", tied=True"]
    titles = [c.title for c in checks if c.kind == "runner"]
    assert titles == [f"runner mine (width=2{more})" for more in varied]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["widht=2"], "has no option 'widht' (did you mean 'width'?)\n"),
        (["width=-2"], "width: Input should be greater than 0, not -2\n"),
        (["width"], "override 'width' is not KEY=VALUE\n"),
        (["--uri", "more:x"], "it offers: channel other, store mine\n"),
    ],
)
def test_what_cannot_be_asked_is_explained(loose: Loose, arguments: list[str], said: str) -> None:
    loose.write(OFFERS)
    result = loose.check(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_the_users_own_pytest_is_left_out(
    loose: Loose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemExit('conftest of the user')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    before = {*tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--another-flag")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    assert loose.check().exit_code == 0
    assert {*tmp_path.iterdir()} - {tmp_path / "__pycache__"} == before


def test_a_test_in_which_the_process_dies_fails(loose: Loose) -> None:
    dies = "import os, sys; print('no more memory', file=sys.__stderr__, flush=True); os._exit(3)"
    loose.write(GRAPHS, dies)
    result = loose.check()
    assert result.exit_code == 1
    assert "  FAIL     it changes nothing in the batch\n" in result.output
    assert "the process ended here with exit status 3" in result.output


def test_a_suite_that_cannot_be_loaded_is_a_failure(
    loose: Loose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a package that only the suites need is broken."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pydantic.py").write_text("raise ImportError('pydantic is broken')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.setenv("TESTS_EXECUTE", "1")  # a fork has the right one
    (found,) = check.run([check.Check("plugin", "", loose.name, str(loose.file), {}, "")])
    assert (found.outcome, found.words) == ("failed", "the suite can be loaded")
    assert "pydantic is broken" in found.message


def sleeping(note: Path) -> str:
    """Return the body of a hook that notes its process and does not end."""
    return f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"


def gone(note: Path) -> bool:
    """Whether the process whose id is in a file ends soon."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            os.kill(int(note.read_text()), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


DEAF = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])"  # as what waits in C


@pytest.mark.parametrize(("before", "times"), [("", 1), (DEAF, HARD)])
def test_a_test_that_hangs_is_ended_says_where_and_is_the_last_of_its_suite(
    loose: Loose, tmp_path: Path, before: str, times: int
) -> None:
    loose.write(
        GRAPHS, f"import signal; {before}; {sleeping(tmp_path / 'pid')}".replace("; ;", ";")
    )
    found = list(check.run(check.suites_of(loose.plugin, [], None)[1:], limit=2))
    ended = [one for one in found if one.outcome not in ("running", "passed")]
    first, *lines = ended[0].message.splitlines()
    assert ended[0].outcome == "failed"
    assert int(first.removeprefix("no end after ").removesuffix(" s, here:")) >= 2 * times
    assert f"{loose.name}.py" in lines[0]
    assert "graph_plugin" in lines[0]
    assert lines[-1].startswith("what comes after it ")
    assert all(one.message.startswith(f"not tested, as {ended[0].test}") for one in ended[1:])
    assert gone(tmp_path / "pid")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_check_ends_its_process(loose: Loose, tmp_path: Path, how: int) -> None:
    note = tmp_path / "pid"
    loose.write(GRAPHS, sleeping(note))
    command = [sys.executable, "-m", "draftcore", "--plugin", str(loose.file)]
    process = subprocess.Popen(
        [*command, "check-plugin", loose.name], env=child_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 300
    state = Path(f"/proc/{process.pid}/stat")  # S: it has read all that was reported, and waits
    while time.monotonic() < until:
        if note.exists() and note.read_text() and ") S " in state.read_text():
            break
        time.sleep(0.05)
    process.send_signal(how)
    _, error = process.communicate(timeout=300)
    assert gone(note)
    if how == signal.SIGINT:
        where = "in: graph-plugin mine: it changes nothing in the batch"
        assert (process.returncode, error) == (130, f"{where}\ninterrupted\n")
