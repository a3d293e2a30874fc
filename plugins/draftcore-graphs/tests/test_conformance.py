"""The conformance suites: plugin, runner, graph plugins, and graph backends as far as a CPU goes.

Those that compile are in test_torch_compile.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_sdk.graph_plugins import GraphPluginSuite
from draftcore_sdk.graphs import GraphBackendSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite

PLUGIN = "draftcore_graphs.plugin"


class TestPlugin(PluginSuite):
    plugin = PLUGIN


class TestGraphs(RunnerSuite):
    plugin, name, options = PLUGIN, "graphs", {"backend": "recording"}


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
