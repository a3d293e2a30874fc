"""The built-in capture does through graphs all that a capture must do: the whole suite, padded."""

import sys
import types

from draftcore import hookimpl
from draftcore.graphs.prefill import PrefillGraphRunner
from draftcore.graphs.recording import RecordingBackend
from draftcore.graphs.resolve import Phase
from draftcore.local_capture import LocalCapture
from draftcore.offers import Offer
from draftcore.records import FeatureRequest
from draftcore.target import TargetModel, TargetSpec
from draftcore.testing.captures import CaptureSuite

PHASE = Phase("prefill", "recording", rows=(2, 4), lengths=(32, 64), decided={"backend": "you"})


@hookimpl
def describe() -> list[Offer]:
    return [Offer("capture", "graphed", frozenset({"overlap"}))]


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest) -> LocalCapture:
    target.prefill_with = through_graphs
    return LocalCapture(target, request)


def through_graphs(model: TargetModel) -> PrefillGraphRunner:
    runner = PrefillGraphRunner(model, PHASE, RecordingBackend())
    RUNNERS.append(runner)
    return runner


RUNNERS: list[PrefillGraphRunner] = []
plugin = types.ModuleType("draftcore_tests_graphed")
vars(plugin).update(describe=describe, capture=capture)
sys.modules[plugin.__name__] = plugin


class TestCaptureThroughGraphs(CaptureSuite):
    plugin = plugin.__name__


def test_nearly_all_of_it_was_replayed() -> None:
    replayed = sum(runner.counts["replayed"] for runner in RUNNERS)
    assert replayed > 0.8 * sum(sum(runner.counts.values()) for runner in RUNNERS)
