"""The configuration of a run, from YAML and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftcore.config import GONE, RunConfig, load_config
from draftcore.errors import UsageError

YAML = "run: here\ntarget: {path: there}\nalgorithm: {name: mine}\n"


def refusal(tmp_path: Path, *overrides: str) -> str:
    (tmp_path / "run.yaml").write_text(YAML)
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "run.yaml", overrides)
    return str(caught.value)


def test_a_key_that_is_gone_is_answered_with_what_replaced_it(tmp_path: Path) -> None:
    text = refusal(tmp_path, "graphs.prefill.backend=auto", "colour=red")
    assert "2 wrong" in text
    assert "  graphs: is gone; runner.prefill and runner.decode replace it" in text
    assert "name: graphs, options: {backend: auto}" in text
    assert "  colour: unknown key" in text


def test_what_is_gone_is_no_key() -> None:
    assert not GONE.keys() & RunConfig.model_fields.keys()


def test_an_option_beside_name_and_options_is_an_unknown_key_of_that_section(
    tmp_path: Path,
) -> None:
    text = refusal(tmp_path, "runner.prefill.backend=auto", "runner.prefill.name=graphs")
    assert "runner.prefill.backend: unknown key; there are name, options" in text
