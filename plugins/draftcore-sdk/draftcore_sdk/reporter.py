"""The pytest plugin of `check-plugin`: writes one JSON line per test to a file descriptor.

It runs in the process that pytest has to itself. A test's line comes after its teardown and says
the worst of its three phases.
"""

import json
import os
from typing import Any

import pytest

ORDER = ("passed", "skipped", "xfailed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=int, required=True, help="file descriptor to write to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config.getoption("--report-to")))


class Reporter:
    """Collects the phases of the test that runs."""

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(descriptor, "w", encoding="utf-8")
        self.worst: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.worst = {"test": nodeid, "outcome": "passed", "seconds": 0.0}
        self._write({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, why = judge(report)
        self.worst["seconds"] += report.duration
        if ORDER.index(outcome) > ORDER.index(self.worst["outcome"]):
            self.worst |= {"outcome": outcome, **why}

    def pytest_runtest_logfinish(self) -> None:
        self._write(self.worst)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be collected is a failure; pytest would run the others only."""
        if report.failed:
            why = explain(report)
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, **why})

    def _write(self, data: dict[str, Any]) -> None:
        self.file.write(json.dumps(data) + "\n")
        self.file.flush()


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
    where = f"{crash.path}:{crash.lineno}" if crash else ""
    return {"message": message, "where": where, "traceback": report.longreprtext}
