"""The conformance suites of graph backends, as far as they go without CUDA, and of graph plugins.

`piecewise` comes last: what Dynamo leaves in memory makes every later look at it slow.
"""

from collections.abc import Iterator

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_sdk.graph_plugins import GraphPluginSuite
from draftcore_sdk.graphs import GraphBackendSuite

PLUGIN = "draftcore_graphs.plugin"


class TestOverlap(GraphPluginSuite):
    plugin, name = PLUGIN, "tbo"


class TestOverlapThatCutsNoRow(GraphPluginSuite):
    plugin, name, options = PLUGIN, "tbo", {"least_share": 0}


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
