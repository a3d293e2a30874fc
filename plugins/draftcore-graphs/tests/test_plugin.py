"""What the plugin offers and how it is built, and what it refuses where there is no CUDA."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import draftcore_graphs
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
from draftcore_sdk.suite import opened

from draftcore.errors import UsageError

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
OFFERS = {(offer.kind, offer.name): offer.capabilities for offer in plugin.describe()}
GRAPHS = {name: able for (kind, name), able in OFFERS.items() if kind == "graph"}


def open_backend(name: str, **options: Any) -> Any:
    return opened("draftcore_graphs.plugin", "graph", name, options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
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
    """But for compilers that record no graphs."""
    with pytest.raises(UsageError) as refused:
        open_backend(name, **options)
    message = str(refused.value)
    assert f"{name!r}" in message
    assert torch.__version__ in message
    assert "runner.prefill.name=eager" in message.splitlines()[-1]
    open_backend("piecewise", compiler="aot_eager")


def test_work_on_the_cpu_and_an_unknown_compiler_are_refused() -> None:
    with pytest.raises(UsageError, match=r"runs on cpu\n  set target\.device=cuda"):
        CudaSegments(torch.device("cpu"), "full")
    with pytest.raises(UsageError, match=r"no backend 'inducktor'\n  there are .*inductor"):
        open_backend("piecewise", compiler="inducktor")


def test_halves_run_where_a_backend_records_streams_of_their_own() -> None:
    """A break or a compiled piece ends where the second stream is still away."""
    assert "forks" in OFFERS["graph-plugin", "tbo"]
    assert {name for name, able in GRAPHS.items() if "forks" in able} == {"full", "recording"}


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("backend", {*GRAPHS}),
        ("rule", {rule.name for rule in (*RULES, *PLUGIN_RULES)}),
        ("option", {*GraphsOptions.model_fields}),
    ],
)
def test_the_readmes_tables_have_every_backend_rule_and_option_and_no_other(
    head: str, names: set[str]
) -> None:
    table = README.split(f"| {head} |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == sorted(names)
    offers = [name for _, name in OFFERS]
    for model in (BreakableOptions, PiecewiseOptions, OverlapOptions):
        offers += model.model_fields
    assert [name for name in offers if f"`{name}`" not in README] == []


@pytest.mark.parametrize(("backend", "said"), re.findall(r"^\| `(\w+)` .* \| (\w+)[^|]*\|$",
    README.split("## Backends")[1].split("## Rules")[0], re.MULTILINE))  # fmt: skip
def test_a_backend_works_in_the_phases_of_the_readmes_table(backend: str, said: str) -> None:
    """In another it is refused before anything is loaded or compiled."""
    facts = Facts(2, 256, "cuda", GRAPHS)
    given = GraphsOptions(backend=backend)
    assert resolve("prefill", given, facts).backend == backend
    if said == "both":
        assert resolve("decode", given, facts).backend == backend
    else:
        assert said == "prefill"
        with pytest.raises(UsageError, match=r"the rule 'phase' refuses it\n.*\n.*name another"):
            resolve("decode", given, facts)


# ---------------------------------------------------------------- how it is built

FILES = {file.stem: file for file in Path(str(draftcore_graphs.__file__)).parent.glob("*.py")}
RUNNERS = ("buffers", "decode", "prefill", "runners")
PHASES = (*RUNNERS, "graphs", "resolve")
# `plugin` opens them all, each under its name.
MECHANISMS = sorted(FILES.keys() - {*PHASES, "plugin"})
RECORD = {"backend", "cuda", "piecewise", "recording", "segments"}


@pytest.mark.parametrize("name", [*RUNNERS, *MECHANISMS])
def test_a_runner_knows_no_mechanism_and_a_mechanism_no_phase(name: str) -> None:
    """A limit of a mechanism is its `can_run`, never a look at its type."""
    assert set(MECHANISMS) >= RECORD
    source, found = FILES[name].read_text(), set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    others = RECORD if name in RUNNERS else PHASES
    assert not {f"draftcore_graphs.{module}" for module in others} & found
    assert name not in RUNNERS or not re.search(r"isinstance\((self\.)?backend", source)
