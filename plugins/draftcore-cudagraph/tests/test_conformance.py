"""The conformance suite of graph backends, as far as it goes without CUDA.

`piecewise` comes last: what Dynamo leaves in memory makes every later look at it slow.
"""

from collections.abc import Iterator

import pytest
import torch
from draftcore_cudagraph.backend import SegmentBackend

from draftcore.testing.graphs import GraphBackendSuite

PLUGIN = "draftcore_cudagraph.plugin"


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
