"""What the plugin offers, and what it refuses where there is no CUDA."""

import pytest
import torch
from draftcore_graphs import plugin
from draftcore_graphs.config import PhaseConfig
from draftcore_graphs.cuda import CudaSegments
from draftcore_graphs.options import PiecewiseOptions
from draftcore_graphs.resolve import Facts, resolve
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.suite import hooks_of, offer_of, options_of

from draftcore.errors import UsageError

PLUGIN = "draftcore_graphs.plugin"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")


class TestCudagraphPlugin(PluginSuite):
    plugin = PLUGIN


def open_backend(name, **options):
    model = options_of(offer_of(PLUGIN, "graph", name), options)
    return hooks_of(PLUGIN).graph_backend(name=name, options=model)


@without_cuda
@pytest.mark.parametrize("name", ["full", "breakable", "piecewise"])
def test_a_backend_is_refused_without_cuda_and_says_what_to_do(name):
    with pytest.raises(UsageError) as refused:
        open_backend(name)
    message = str(refused.value)
    assert f"{name!r}" in message
    assert torch.__version__ in message
    assert "graphs.prefill.backend=eager" in message.splitlines()[-1]


@without_cuda
def test_debug_is_no_way_around_that():
    with pytest.raises(UsageError, match="no CUDA device"):
        open_backend("breakable", debug=True)


def test_work_on_the_cpu_is_refused_where_there_is_cuda():
    with pytest.raises(UsageError, match=r"runs on cpu\n  set target\.device=cuda"):
        CudaSegments(torch.device("cpu"), "full")


@pytest.mark.parametrize(
    ("backend", "refuses"), [("full", None), ("breakable", "forks"), ("piecewise", "forks")]
)
def test_halves_run_on_streams_of_their_own_where_a_backend_records_these(backend, refuses):
    """A break or a compiled piece ends where the second stream is still away."""
    offers = plugin.describe()
    offered = {
        kind: {offer.name: offer.capabilities for offer in offers if offer.kind == kind}
        for kind in ("graph", "graph-plugin")
    }
    facts = Facts(4, 256, "cuda", backends=offered["graph"], plugins=offered["graph-plugin"])
    given = PhaseConfig(backend=backend, plugins={"tbo": {}})
    if refuses is None:
        assert resolve("prefill", given, facts).plugins == {"tbo": {}}
        return
    with pytest.raises(UsageError) as refused:
        resolve("prefill", given, facts)
    assert f"the rule {refuses!r} refuses it with the backend {backend!r}" in str(refused.value)
    assert str(refused.value).endswith("or set graphs.prefill.backend to full")


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
def test_only_a_compiler_that_records_graphs_needs_cuda(options, records):
    assert PiecewiseOptions(**options).records_graphs is records


def test_an_unknown_compiler_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=r"no backend 'inducktor'\n  there are .*inductor"):
        open_backend("piecewise", compiler="inducktor")


def test_a_mode_of_another_compiler_is_refused():
    with pytest.raises(UsageError, match=r"compiler=eager has none"):
        open_backend("piecewise", compiler="eager", mode="default")


def test_names_of_others_are_left_to_others():
    assert plugin.graph_backend("recording", None) is None
    assert plugin.graph_plugin("other", None) is None
