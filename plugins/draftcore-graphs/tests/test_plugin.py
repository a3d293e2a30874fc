"""What the plugin offers, and what it refuses where there is no CUDA."""

from __future__ import annotations

import re
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
from draftcore_graphs.resolve import PLUGIN_RULES, RULES
from draftcore_sdk.suite import opened

from draftcore.contracts.runner import GraphBackend
from draftcore.errors import UsageError

PLUGIN = "draftcore_graphs.plugin"
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")


def open_backend(name: str, **options: Any) -> GraphBackend:
    backend: GraphBackend = opened(PLUGIN, "graph", name, options)
    return backend


@without_cuda
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {}),
        ("breakable", {}),
        ("breakable", {"debug": True}),
        ("piecewise", {}),
        ("piecewise", {"compiler": "cudagraphs"}),
    ],
)
def test_a_backend_is_refused_without_cuda_and_says_what_to_do(name: str, options: Any) -> None:
    with pytest.raises(UsageError) as refused:
        open_backend(name, **options)
    message = str(refused.value)
    assert f"{name!r}" in message
    assert torch.__version__ in message
    assert "runner.prefill.name=eager" in message.splitlines()[-1]


def test_work_on_the_cpu_is_refused_where_there_is_cuda() -> None:
    with pytest.raises(UsageError, match=r"runs on cpu\n  set target\.device=cuda"):
        CudaSegments(torch.device("cpu"), "full")


def test_halves_run_where_a_backend_records_streams_of_their_own() -> None:
    """A break or a compiled piece ends where the second stream is still away."""
    offers = {(offer.kind, offer.name): offer.capabilities for offer in plugin.describe()}
    forking = {name for (kind, name), able in offers.items() if kind == "graph" and "forks" in able}
    assert "forks" in offers["graph-plugin", "tbo"]
    assert forking == {"full", "recording"}


def test_only_a_compiler_that_records_graphs_needs_cuda() -> None:
    open_backend("piecewise", compiler="aot_eager")


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no backend 'inducktor'\n  there are .*inductor"):
        open_backend("piecewise", compiler="inducktor")


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("backend", [offer.name for offer in plugin.describe() if offer.kind == "graph"]),
        ("rule", [rule.name for rule in (*RULES, *PLUGIN_RULES)]),
        ("option", list(GraphsOptions.model_fields)),
    ],
)
def test_the_readmes_tables_have_every_backend_rule_and_option_and_no_other(
    head: str, names: list[str]
) -> None:
    table = README.split(f"| {head} |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == sorted(names)


def test_the_readme_names_every_offer_and_option() -> None:
    names = [offer.name for offer in plugin.describe()]
    for model in (BreakableOptions, PiecewiseOptions, OverlapOptions):
        names += model.model_fields
    assert [name for name in names if f"`{name}`" not in README] == []
