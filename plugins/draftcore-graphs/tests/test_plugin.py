"""What the plugin offers, and what it refuses where there is no CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs import plugin
from draftcore_graphs.cuda import CudaSegments
from draftcore_graphs.options import (
    BreakableOptions,
    GraphsOptions,
    OverlapOptions,
    PiecewiseOptions,
)
from draftcore_graphs.resolve import PLUGIN_RULES, RULES, Facts, resolve
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.suite import hooks_of, offer_of, options_of

from draftcore.contracts.runner import GraphBackend
from draftcore.errors import UsageError

PLUGIN = "draftcore_graphs.plugin"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")


class TestGraphsPlugin(PluginSuite):
    plugin = PLUGIN


def open_backend(name: str, **options: Any) -> GraphBackend:
    model = options_of(offer_of(PLUGIN, "graph", name), options)
    return hooks_of(PLUGIN).graph_backend(name=name, options=model)


@without_cuda
@pytest.mark.parametrize("name", ["full", "breakable", "piecewise"])
def test_a_backend_is_refused_without_cuda_and_says_what_to_do(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_backend(name)
    message = str(refused.value)
    assert f"{name!r}" in message
    assert torch.__version__ in message
    assert "runner.prefill.name=eager" in message.splitlines()[-1]


@without_cuda
def test_debug_is_no_way_around_that() -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        open_backend("breakable", debug=True)


def test_work_on_the_cpu_is_refused_where_there_is_cuda() -> None:
    with pytest.raises(UsageError, match=r"runs on cpu\n  set target\.device=cuda"):
        CudaSegments(torch.device("cpu"), "full")


@pytest.mark.parametrize(
    ("backend", "refuses"), [("full", None), ("breakable", "forks"), ("piecewise", "forks")]
)
def test_halves_run_on_streams_of_their_own_where_a_backend_records_these(
    backend: str, refuses: str | None
) -> None:
    """A break or a compiled piece ends where the second stream is still away."""
    offers = plugin.describe()
    offered = {
        kind: {offer.name: offer.capabilities for offer in offers if offer.kind == kind}
        for kind in ("graph", "graph-plugin")
    }
    facts = Facts(4, 256, "cuda", backends=offered["graph"], plugins=offered["graph-plugin"])
    given = GraphsOptions(backend=backend, plugins={"tbo": {}})
    if refuses is None:
        assert resolve("prefill", given, facts).plugins == {"tbo": {}}
        return
    with pytest.raises(UsageError) as refused:
        resolve("prefill", given, facts)
    assert f"the rule {refuses!r} refuses it with the backend {backend!r}" in str(refused.value)
    others = "full or recording"
    assert str(refused.value).endswith(f"or set runner.prefill.options.backend to {others}")


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({}, True),
        ({"mode": "max-autotune"}, True),
        ({"compiler": "cudagraphs"}, True),
        ({"mode": "default"}, False),
        ({"compiler": "aot_eager"}, False),
    ],
)
def test_only_a_compiler_that_records_graphs_needs_cuda(options: Any, records: bool) -> None:
    assert PiecewiseOptions(**options).records_graphs is records


def test_an_unknown_compiler_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no backend 'inducktor'\n  there are .*inductor"):
        open_backend("piecewise", compiler="inducktor")


def test_a_mode_of_another_compiler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compiler=eager has none"):
        open_backend("piecewise", compiler="eager", mode="default")


def test_names_of_others_are_left_to_others() -> None:
    context: Any = None
    assert plugin.runner("eager", context, None) is None
    assert plugin.graph_backend("other", None) is None
    assert plugin.graph_plugin("other", None) is None


def test_the_readme_names_every_backend_rule_and_option() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    names = [offer.name for offer in plugin.describe()]
    names += [rule.name for rule in (*RULES, *PLUGIN_RULES)]
    for model in (GraphsOptions, BreakableOptions, PiecewiseOptions, OverlapOptions):
        names += model.model_fields
    assert [name for name in names if f"`{name}`" not in text] == []
