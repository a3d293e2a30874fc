"""The Medusa example, an algorithm of a dist that this project does not know: its whole life."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.thirdparty.conftest import Environment, NewEnvironment, NewRun, Run

PROJECT = Path(__file__).parents[2] / "examples" / "plugins" / "draftcore-medusa"


@pytest.fixture(scope="module")
def here(new_environment: NewEnvironment) -> Environment:
    """An environment with the core's wheel and the example's."""
    return new_environment("draftcore", "draftcore-medusa")


@pytest.fixture(scope="module")
def trained(here: Environment, new_run: NewRun) -> Run:
    run = new_run("medusa", num_heads=3)
    here.draftcore("train", run.yaml)
    return run


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of the trained run, in another folder."""
    shutil.copytree(trained.folder, tmp_path / "run")
    text = trained.yaml.read_text().replace(str(trained.folder), str(tmp_path / "run"))
    (tmp_path / "run.yaml").write_text(text)
    return type(trained)(tmp_path / "run.yaml", tmp_path / "run")


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """The example's project as version 0.2.0."""
    project = shutil.copytree(PROJECT, tmp_path / "project")
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('version = "0.1.0"', 'version = "0.2.0"'))
    return project


def test_it_is_evaluated_and_exported_and_the_export_is_as_good(
    here: Environment, run: Run
) -> None:
    report = json.loads(here.draftcore("eval", run.yaml, "--json"))
    assert report["lossless"] is True
    assert report["num_drafts"] == 3
    here.draftcore("export", run.yaml)
    export = run.folder / "export"
    origin = json.loads((export / "draftcore.json").read_text())
    assert run.manifest(2, "medusa") in origin["plugins"]
    assert json.loads((export / "config.json").read_text())["model_type"] == "medusa"
    again = json.loads(here.draftcore("eval", run.yaml, "--export", export, "--json"))
    for key in ("acceptance_length", "acceptance_by_position", "tokens", "rounds", "lossless"):
        assert again[key] == report[key]


def test_a_checkpoint_names_the_dist_that_trained_it(trained: Run) -> None:
    assert trained.manifest(2, "medusa") == {
        "name": "medusa", "dist": "draftcore-medusa", "version": "0.1.0", "origin": "",
    }  # fmt: skip


def test_another_version_from_a_checkout_evaluates_it_and_trains_on(
    new_environment: NewEnvironment, run: Run, next_version: Path
) -> None:
    there = new_environment("draftcore")
    there.install_editable(next_version)
    assert there.plugins()["medusa"]["version"] == "0.2.0"
    assert f"editable: {next_version}" in there.draftcore("list-plugins")
    assert json.loads(there.draftcore("eval", run.yaml, "--json"))["lossless"] is True
    there.draftcore("train", run.yaml, "train.epochs=2")
    assert run.manifest(4, "medusa") == {
        "name": "medusa",
        "dist": "draftcore-medusa",
        "version": "0.2.0",
        "origin": f"editable: {next_version}",
    }


def test_it_comes_alone_and_once_gone_it_is_named(
    new_environment: NewEnvironment, run: Run
) -> None:
    there = new_environment("draftcore")
    listed = there.plugins()
    there.install("draftcore-medusa")
    grown = there.plugins()
    assert grown.pop("medusa")["state"] == "ready"
    assert grown == listed
    there.uninstall("draftcore-medusa")
    assert there.plugins() == listed
    refusal = there.refusal("eval", run.yaml)
    assert "this was made with plugins that are not here" in refusal
    assert refusal.endswith("medusa 0.1.0: pip install draftcore-medusa==0.1.0\n")


def test_its_wheel_ships_types_and_no_tests(here: Environment) -> None:
    names = zipfile.ZipFile(here.wheel("draftcore-medusa")).namelist()
    assert "draftcore_medusa/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "draftcore_medusa", "draftcore_medusa-0.1.0.dist-info",
    }  # fmt: skip
