"""The program `produce`: capture for a trainer elsewhere, until its run ends."""

from __future__ import annotations

from contextlib import closing

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenCapture, OpenRun, RunEnded
from draftcore.errors import UsageError
from draftcore.stopping import stop_on_signal
from draftcore_disagg.channel import PATIENCE, Json
from draftcore_disagg.producer import produce
from draftcore_disagg.queue import RemoteQueue
from draftcore_disagg.queued import open_channel, queue_address


def produce_features(run: OpenRun) -> tuple[str, str]:
    """Capture for a trainer elsewhere until the run ends; see `producer.produce` for what returns.

    Raises UsageError where features made here would not be what the trainer asks for, and where
    the capture cannot work.
    """
    with stop_on_signal() as stop:

        def find_queue() -> str:
            if stop:
                raise RunEnded("asked to stop", "interrupted")
            return queue_address(run.folder)

        def prepare(about: Json) -> tuple[OpenCapture, str]:
            request, theirs = FeatureRequest.from_json(about["request"]), str(about["provenance"])
            if differing := run.differences(request, theirs, "for the trainer"):
                raise UsageError(
                    "features captured here are not what the trainer trains on\n"
                    f"{differing}\n"
                    "  give the producer the trainer's target, algorithm and capture settings"
                )
            return run.open_capture(request), theirs

        open_at = lambda uri: run.open_store(uri)[1]  # noqa: E731
        with closing(open_channel(run).connect(find_queue)) as client:
            return produce(RemoteQueue(client), prepare, open_at, lambda: bool(stop), PATIENCE)
