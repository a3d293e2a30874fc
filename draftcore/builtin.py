"""The plugin that draftcore brings along: what makes it run alone, and the verbs that do the work.

It registers as third parties do, by an entry point and through hooks. What is heavy is imported where
it is opened (torch takes 1.6 s), so that listing plugins stays quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    import click

    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.channel import Channel
    from draftcore.contracts.launcher import Launcher
    from draftcore.contracts.runner import Runner, RunnerContext
    from draftcore.contracts.source import Source
    from draftcore.contracts.store import FeatureStore
    from draftcore.contracts.target import TargetSpec

CAPTURES = "embeddings graphs images per-rank tensor-parallel topk"
OFFERS = (
    Offer("capture", "hf", frozenset(CAPTURES.split())),
    Offer("store", "file", frozenset({"durable", "shared"})),
    Offer("channel", "tcp"),
    Offer("source", "jsonl"),
    Offer("launcher", "local"),
    Offer("runner", "eager"),
)


@hookimpl
def describe() -> Sequence[Offer]:
    return OFFERS


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore.verbs import capture, evaluate, export, train

    return [capture, train, evaluate, export]


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest) -> Capture:
    from draftcore.features.hf import LocalCapture

    return LocalCapture(target, request)


@hookimpl
def feature_store(name: str, uri: str) -> FeatureStore:
    from draftcore.features.stores.file import FileStore

    return FileStore.open(uri)


@hookimpl
def channel(name: str, uri: str, secret: bytes) -> Channel:
    from draftcore.features.tcp import TcpChannel

    return TcpChannel.open(uri, secret)


@hookimpl
def source(name: str, uri: str) -> Source:
    from draftcore.data.sources import open_lines

    return open_lines(uri)


@hookimpl
def launcher(name: str) -> Launcher:
    from draftcore.launcher import LocalLauncher

    return LocalLauncher()


@hookimpl
def runner(name: str, context: RunnerContext) -> Runner:
    from draftcore.evaluation.decode import Eager

    return Eager()
