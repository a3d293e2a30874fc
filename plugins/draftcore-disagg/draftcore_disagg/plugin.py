"""The hooks of the queue, its channel `tcp` and the launcher `local`. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    import click

    from draftcore.contracts.launcher import Launcher
    from draftcore.contracts.run import BatchSource, OpenRun
    from draftcore_disagg.channel import Channel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("batches", "queue"), Offer("channel", "tcp"), Offer("launcher", "local")]


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore_disagg.verbs import produce, scale, status

    return [produce, scale, status]


@hookimpl
def batches(name: str, run: OpenRun) -> BatchSource:
    from draftcore_disagg.queued import QueueSource

    return QueueSource(run)


@hookimpl
def channel(name: str, uri: str, secret: bytes) -> Channel:
    from draftcore_disagg.tcp import TcpChannel

    return TcpChannel.open(uri, secret)


@hookimpl
def launcher(name: str) -> Launcher:
    from draftcore_disagg.local import LocalLauncher

    return LocalLauncher()
