"""The pytest plugin of `check-plugin`: writes a JSON line before and after each test to a pipe.

It runs in the process that pytest has to itself. A test's last line comes after its teardown and
says the worst of its three phases. When the process that reads is gone, however it ended, all that
was started here ends.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from draftcore_sdk import limits

WIDE = 600  # letters of a line that are shown, and lines
ORDER = ("passed", "skipped", "xfailed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=int, required=True, help="file descriptor to write to")
    parser.addoption("--end-with", type=int, required=True, help="descriptor that the reader holds")
    parser.addoption("--limit", type=float, required=True, help="seconds that a test may take")
    parser.addoption("--quick", action="store_true", help="no slow tests, no further options")
    parser.addoption("--only", default="", help="part of the names of the tests to run")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config.getoption("--report-to")))
    limits.LIMIT = config.getoption("--limit")  # suites are imported later
    held = config.getoption("--end-with")
    threading.Thread(target=end_with, args=(held,), daemon=True).start()


def end_with(held: int) -> None:
    """End this session of processes when nobody holds the other end of a pipe any more."""
    os.read(held, 1)
    os.killpg(0, signal.SIGKILL)


class Reporter:
    """Collects the phases of the test that runs."""

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(descriptor, "w", encoding="utf-8")
        self.log = os.dup(sys.stderr.fileno())  # what pytest captures of a test is lost with it
        self.worst: dict[str, Any] = {}
        self.slow: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Leave out what was not asked for; tell the names of all tests where none was asked for."""
        names, only = [item.originalname for item in items], config.getoption("--only")
        items[:] = [item for item in items if "_".join(only.split()) in item.name]
        if not items:
            self._write({"names": list(dict.fromkeys(names))})
        slow = [item for item in items if hasattr(item.function, "slow")]
        if config.getoption("--quick"):
            items[:] = [item for item in items if number_of(item) in (None, 1)]
            for item in slow:
                item.add_marker(pytest.mark.skip(reason="slow, left out by --quick"))
        else:
            self.slow = {item.nodeid for item in slow}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.worst = {"test": nodeid, "outcome": "passed", "seconds": 0.0}
        self._write({"started": nodeid, "slow": nodeid in self.slow})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, why = judge(report)
        self.worst["seconds"] += report.duration
        for _, said in report.user_properties:  # what a test that passes was judged by
            self.worst.setdefault("message", said)
        if ORDER.index(outcome) > ORDER.index(self.worst["outcome"]):
            self.worst |= {"outcome": outcome, **why}

    def pytest_runtest_logfinish(self) -> None:
        self._write(self.worst)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be collected is a failure; pytest would run the others only."""
        if report.failed:
            why = explain(report)
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, **why})

    def pytest_unconfigure(self) -> None:
        """End soon, even where a thread of a plugin goes on."""
        faulthandler.dump_traceback_later(10, exit=True, file=self.log)

    def _write(self, data: dict[str, Any]) -> None:
        self.file.write(json.dumps(data) + "\n")
        self.file.flush()


def number_of(item: Any) -> int | None:
    """Return which set of options a test of an algorithm tries, where its offer has examples."""
    options: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return options.get("bench")


def judge(report: pytest.TestReport) -> tuple[str, dict[str, str]]:
    """Return a phase's outcome and what explains it."""
    if report.skipped and hasattr(report, "wasxfail"):
        return "xfailed", {"message": report.wasxfail.removeprefix("reason: ")}
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        return "skipped", {"message": reason.removeprefix("Skipped: ")}
    return report.outcome, explain(report) if report.failed else {}


def explain(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    """Return what was raised, where, and the whole traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else report.longreprtext.strip().splitlines()[-1]
    for prefix in ("AssertionError: ", "Failed: ", "E   "):
        message = message.removeprefix(prefix)
    message = "\n".join(line[:WIDE] for line in message.splitlines()[:WIDE])
    where = f"{crash.path}:{crash.lineno}" if crash else ""
    return {"message": message, "where": where, "traceback": report.longreprtext}
