"""A transport of records between processes: what to write for a channel over another medium.

`opening.open_end` makes a channel of any `Log`; all that a channel must do is done there, once.
`sqlite.SqliteLog` is the built-in one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from draftcore.channels import NAME

Letter = tuple[str, dict[str, Any]]  # (a name, a record of plain JSON)
logger = logging.getLogger(__name__)


class Log(Protocol):
    """A transport: one process's mailbox, and its way to those of others.

    `append` may be called by several threads at once, the rest by one thread. Names match
    `channels.NAME`. Failures of the medium are DraftcoreErrors that say what to do.
    """

    def head(self) -> dict[str, Any] | None:
        """Return what `set_head` wrote last, by whichever process; None where nobody did.

        None also where the medium may have lost letters since: the trainer then begins anew.
        """
        ...

    def set_head(self, head: Mapping[str, Any]) -> None:
        """Replace the head: a reader sees the old one or the new one, whatever crashes."""
        ...

    def append(self, letters: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Send records, as (recipient, record); they are durable when this returns."""
        ...

    def read(self) -> list[Letter]:
        """Return what is new in this mailbox, as (writer, record), in each writer's order.

        A torn record is never returned; a malformed one is skipped and reported (`report`).
        """
        ...

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or earlier when something may be new."""
        ...

    def trim(self) -> None:
        """Forget what `read` has returned: a long run must not pile it up."""
        ...

    def drop(self, name: str) -> None:
        """A process is gone: forget its mailbox and what it wrote here. It may come back."""
        ...

    def hurry(self) -> None:
        """The channel is closing: wait for a medium that is away no longer than seconds.

        May be called by another thread, also while that one waits.
        """
        ...

    def close(self) -> None: ...


OpenLog = Callable[[str], Log]  # from the name of the mailbox


def report(writer: str, problem: object) -> None:
    """Tell of a record that is skipped."""
    logger.warning("skipped a record of %s in the channel: %s", writer, problem)


def parse_record(writer: str, text: str | bytes) -> dict[str, Any] | None:
    """Return a record, or None for one that is malformed, which is reported."""
    try:
        record = json.loads(text)
    except (TypeError, ValueError) as error:
        report(writer[:64], f"not JSON: {error}")
        return None
    if not isinstance(record, dict) or NAME.fullmatch(writer) is None:
        report(writer[:64], f"not a record of a mailbox: {record!r:.80}")
        return None
    return record
