"""Open one end of a channel between processes, over any transport."""

from __future__ import annotations

from draftcore.channels import require_name
from draftcore.channels.log import OpenLog
from draftcore.channels.logged import LoggedChannel, Settings
from draftcore.channels.producer_end import ProducerEnd
from draftcore.channels.trainer_end import TrainerEnd
from draftcore.errors import UsageError
from draftcore.uris import Uri


def open_end(uri: Uri, run_id: str, role: str, open_log: OpenLog) -> LoggedChannel:
    """Open one end of a run's channel. Raises UsageError for another or a finished run's."""
    if role not in ("trainer", "producer"):
        raise UsageError(
            f"the channel {uri.text!r} has two ends, and a run that is both was asked for\n"
            "  run trainer and producers as processes of their own, or set channel=memory"
        )
    if role == "trainer" or run_id:  # a producer elsewhere takes the run that it finds
        require_name("run", run_id)
    kind = TrainerEnd if role == "trainer" else ProducerEnd
    return kind(uri.text, run_id, Settings.of(uri), open_log)
