"""The conformance suites: plugin, runner, graph plugins, and graph backends as far as a CPU goes.

`piecewise` comes last: what Dynamo leaves in memory makes every later look at it slow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from draftcore_eval.decode import right_padded
from draftcore_graphs.backend import SegmentBackend
from draftcore_sdk.graph_plugins import GraphPluginSuite
from draftcore_sdk.graphs import GraphBackendSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel

PLUGIN = "draftcore_graphs.plugin"


class TestPlugin(PluginSuite):
    plugin = PLUGIN


class TestGraphs(RunnerSuite):
    plugin, name, options = PLUGIN, "graphs", {"backend": "recording"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
class TestCompiled(RunnerSuite):
    plugin, name = PLUGIN, "compiled"

    def test_decoding_meanwhile_runs_the_layers_as_they_are(self, target: TargetModel) -> None:
        prefill = self.runner("prefill").prefill(target)
        request = FeatureRequest((1,), True, "float32")
        tokens_BT, lengths_B = right_padded([[1, 2, 3]], "cpu")
        before = target.features(tokens_BT, lengths_B, request)
        prefill.features(tokens_BT, lengths_B, request)
        after = target.features(tokens_BT, lengths_B, request)
        assert all(torch.equal(before[name], after[name]) for name in request.names)
        assert not any("forward" in vars(layer) for layer in target.layers)


class TestOverlap(GraphPluginSuite):
    plugin, name = PLUGIN, "tbo"


class TestOverlapThatCutsNoRow(GraphPluginSuite):
    plugin, name, options = PLUGIN, "tbo", {"least_share": 0}


class TestRecording(GraphBackendSuite):
    plugin, name = PLUGIN, "recording"


class TestSegments(GraphBackendSuite):
    """`breakable` over the CPU's segments."""

    plugin, name = PLUGIN, "breakable"

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")

    @pytest.fixture
    def backend(self, backend: SegmentBackend) -> Iterator[SegmentBackend]:
        with torch.inference_mode():
            yield backend
        backend.cleanup()


@pytest.mark.long  # Dynamo compiles anew for every bucket of its twenty cycles
class TestPiecewise(GraphBackendSuite):
    plugin, name, options = PLUGIN, "piecewise", {"compiler": "eager"}
