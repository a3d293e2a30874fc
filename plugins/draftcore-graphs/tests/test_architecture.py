"""Runners and mechanisms stay apart, and every key of a runner is shown by the plan."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import draftcore_graphs
import pytest
from draftcore_graphs.options import GraphsOptions
from draftcore_graphs.resolve import Facts, resolve
from pydantic import ValidationError

from draftcore.contracts.runner import PhaseName

PACKAGE = Path(str(draftcore_graphs.__file__)).parent
FILES = {file.stem: file for file in sorted(PACKAGE.glob("*.py"))}
RUNNERS = ("buffers", "decode", "prefill", "runners")
PHASES = (*RUNNERS, "graphs", "resolve")
# `plugin` opens them all, each under its name.
MECHANISMS = [name for name in FILES if name not in (*PHASES, "plugin")]
RECORD = {"backend", "cuda", "piecewise", "recording", "segments"}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", [*RUNNERS, *MECHANISMS])
def test_a_runner_knows_no_mechanism_and_a_mechanism_no_phase(name: str) -> None:
    """A limit of a mechanism is its `can_run`, never a look at its type."""
    assert set(MECHANISMS) >= RECORD
    others = RECORD if name in RUNNERS else PHASES
    assert not {f"draftcore_graphs.{module}" for module in others} & imported(FILES[name])
    if name in RUNNERS:
        assert not re.search(r"isinstance\((self\.)?backend", FILES[name].read_text())


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_every_key_can_be_left_out_is_shown_by_the_plan_and_is_no_other(name: PhaseName) -> None:
    assert GraphsOptions.model_validate({}) == GraphsOptions()
    facts = Facts(2, 256, "cpu", backends={"any": frozenset()})
    shown = {key for key, _, _ in resolve(name, GraphsOptions(backend="any"), facts).lines()}
    assert shown >= GraphsOptions.model_fields.keys()
    with pytest.raises(ValidationError, match="max_bs"):
        GraphsOptions.model_validate({"max_bs": 3})
