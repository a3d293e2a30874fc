"""Errors written for the person who can act on them, and the exit statuses of our processes.

DraftcoreError          something went wrong that is not our bug; the CLI prints it and exits with FAILED
└── UsageError          what was asked cannot be done as asked; the CLI exits with REFUSED

An error says what was asked, what is there, what to do. The last line is the remedy.
"""

from collections.abc import Iterable
from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command ends, and each process of a run."""

    DONE = 0
    FAILED = 1
    REFUSED = 2  # what was asked cannot be done, and would be refused again
    RANK_LOST = 75  # of a rank that lost another: its own work is good, so all ranks start again
    INTERRUPTED = 130  # by a signal, as Ctrl-C sends one


class DraftcoreError(Exception):
    """A failure explained to the user; the CLI shows no traceback for it."""

    exit_status: int = ExitStatus.FAILED

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(DraftcoreError):
    """What the user asked for cannot be done as asked."""

    exit_status = ExitStatus.REFUSED


def printable(text: str) -> str:
    """Escape what would control a terminal, but for ends of lines: others name files and write data."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def one_line(value: object, max_length: int = 500) -> str:
    """Return a text as one line that can be printed, whatever it holds and whoever wrote it.

    What controls a terminal, or would begin a line of its own, is escaped or a space; the rest is cut.
    """
    try:
        text = str(value)
    except BaseException as error:
        text = f"(it has no text: that raises {type(error).__name__})"
    if len(text) > max_length:
        text = f"{text[:max_length]} ... ({len(text)} characters)"
    return printable(" ".join(map(str.strip, text.expandtabs(1).splitlines())))


def raised(error: BaseException) -> str:
    """Return an exception's type and text on a line."""
    return f"{one_line(type(error).__name__)}: {one_line(error)}"


def plural(count: int, noun: str) -> str:
    """Return `1 row` or `2 rows`, `1 batch` or `2 batches`, for people."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def closest(name: str, known: Iterable[str], alike: float = 0.5) -> str:
    """Return the known name that is nearest to `name`, or '' where none is `alike`, of 1 at most."""
    import difflib  # 1 ms, for errors only

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean 'x'?)' for the known name nearest to `name`, or ''."""
    return f" (did you mean {match!r}?)" if (match := closest(name, known)) else ""
