"""The conformance suites: plugin, runner, graph plugins, and graph backends as far as a CPU goes.

Those that compile are in test_torch_compile.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_sdk.graph_plugins import GraphPluginSuite
from draftcore_sdk.graphs import GraphBackendSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import CountingDrafter, RunnerSuite

from draftcore.contracts.runner import PhaseName
from draftcore.errors import UsageError

PLUGIN = "draftcore_graphs.plugin"


class TestPlugin(PluginSuite):
    plugin = PLUGIN


class TestGraphs(RunnerSuite):
    plugin, name, options = PLUGIN, "graphs", {"backend": "recording"}

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_weights_that_a_graph_would_miss_are_refused_by_a_rule(
        self, target: Any, phase: PhaseName
    ) -> None:
        """Those that are elsewhere between forwards, and adapters that the host chooses among."""
        drafter, runner = CountingDrafter(target.spec.vocab_size), self.runner(phase)
        given = (target,) if phase == "prefill" else (target, drafter, drafter.module)
        target.layers[1].self_attn.adapter_layer_names = ("lora_A", "lora_B")  # as peft's have
        with pytest.raises(UsageError, match=r"'adapters' refuses it\n.*: model\.layers\.1\.self_"):
            getattr(runner, phase)(*given)
        target.layers[0].mlp.up_proj.to("meta")  # as accelerate leaves them
        with pytest.raises(
            UsageError, match=r"'offloaded' refuses it\n.*up_proj\.weight is on meta"
        ):
            getattr(runner, phase)(*given)


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
