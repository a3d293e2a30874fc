"""The hooks of the queue, its channel `tcp` and the launcher `local`. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    import click

    from draftcore.contracts.run import BatchSource, OpenRun, Ranks
    from draftcore_disagg.channel import Channel
    from draftcore_disagg.launcher import Launcher


@hookimpl
def describe() -> Sequence[Offer]:
    offers = {"batches": "queue", "ranks": "processes", "channel": "tcp", "launcher": "local"}
    return [Offer(kind, name) for kind, name in offers.items()]


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore_disagg.verbs import produce, scale, status

    return [produce, scale, status]


@hookimpl
def batches(name: str, run: OpenRun) -> BatchSource:
    from draftcore_disagg.queued import QueueSource

    return QueueSource(run)


@hookimpl
def ranks(config: Any) -> Ranks:
    from draftcore_disagg.ranks import Group

    return Group(config)


@hookimpl
def launch(config: Any, command: Sequence[str], arguments: Sequence[str], bind: Any) -> str:
    from draftcore_disagg.launcher import launch

    return launch(config, command, arguments, bind)


@hookimpl
def channel(name: str, uri: str, secret: bytes, patience: float) -> Channel:
    from draftcore_disagg.tcp import TcpChannel

    return TcpChannel.open(uri, secret, patience)


@hookimpl
def launcher(name: str) -> Launcher:
    from draftcore_disagg.local import LocalLauncher

    return LocalLauncher()
