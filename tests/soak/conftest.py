"""Runs whose processes are killed are those of tests/faults."""

from tests.faults.conftest import Run, make_run, nobody_else

__all__ = ["Run", "make_run", "nobody_else"]
