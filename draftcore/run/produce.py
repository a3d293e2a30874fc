"""The program `train --role producer`: capture for a trainer elsewhere, until its run ends."""

from __future__ import annotations

import json
from contextlib import closing, suppress

from draftcore.contracts.capture import Capture
from draftcore.contracts.channel import PATIENCE, Json, RunEnded
from draftcore.errors import UsageError
from draftcore.features.producer import produce
from draftcore.features.provenance import differences
from draftcore.features.queue import RemoteQueue
from draftcore.run import Run
from draftcore.run.features import open_capture, open_store, read_request
from draftcore.training.loop import stop_on_signal


def produce_features(run: Run) -> tuple[str, str]:
    """Capture for a trainer elsewhere until the run ends; see `producer.produce` for what returns.

    Raises UsageError where features made here would not be what the trainer asks for, and where
    the capture cannot work.
    """
    with stop_on_signal() as stop:

        def find_queue() -> str:
            if stop:
                raise RunEnded("asked to stop", "interrupted")
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
                return str(json.loads(run.queue_file.read_text())["address"])
            return ""

        def prepare(about: Json) -> tuple[Capture, str]:
            request, theirs = read_request(about["request"]), str(about["provenance"])
            if (ours := run.provenance(request)) != theirs:
                raise UsageError(
                    "features captured here are not what the trainer trains on\n"
                    f"{differences(ours, theirs, 'for the trainer')}\n"
                    "  give the producer the trainer's target, algorithm and capture settings"
                )
            return open_capture(run, request), ours

        open_at = lambda uri: open_store(run, uri)[1]  # noqa: E731
        with closing(run.open_channel().connect(find_queue)) as client:
            return produce(RemoteQueue(client), prepare, open_at, lambda: bool(stop), PATIENCE)
