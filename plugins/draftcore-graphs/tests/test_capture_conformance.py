"""The built-in capture does through graphs all that a capture must do: the whole suite, padded."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_sdk.captures import CaptureSuite

from draftcore import hookimpl
from draftcore.contracts.capture import CaptureBatch, FeatureRequest
from draftcore.contracts.offers import Offer
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore.features.hf import LocalCapture
from draftcore.target import TransformersTarget

PHASE = Phase("prefill", "recording", rows=(2, 4), lengths=(32, 64), decided={"backend": "you"})


@hookimpl
def describe() -> list[Offer]:
    return [Offer("capture", "graphed")]


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

    @pytest.fixture(autouse=True)
    def every_forward_is_a_replay(self) -> Iterator[None]:
        RUNNERS.clear()
        yield
        assert all(set(runner.counts) <= {"replayed"} for runner in RUNNERS)


def test_the_capture_goes_through_the_runner(target_folder: Path) -> None:
    target = TransformersTarget(str(target_folder), device="cpu")
    batch = CaptureBatch(0, (0, 1), ("a", "b"), ((5, 6, 7), tuple(range(9))))
    opened = capture("graphed", target, FeatureRequest((1,), True, "float32"))
    (captured,) = opened.features([batch])
    assert [len(features["last_hidden"]) for features in captured.features] == [3, 9]
    assert RUNNERS[-1].counts == {"replayed": 1}
