"""The Medusa example, an algorithm of a dist that this project does not know: its whole life."""

import json
import shutil
import zipfile
from pathlib import Path

from tests.thirdparty.conftest import STANDARD, NewEnvironment, NewRun

PROJECT = Path(__file__).parents[2] / "examples" / "plugins" / "draftcore-medusa"
MEDUSA = {"name": "medusa", "dist": "draftcore-medusa", "version": "0.1.0", "origin": ""}


def test_it_is_trained_evaluated_and_exported_and_goes_on_in_another_version_from_a_checkout(
    new_environment: NewEnvironment, new_run: NewRun, tmp_path: Path
) -> None:
    """Its wheel ships types and no tests."""
    here = new_environment(*STANDARD, "draftcore-nn", "draftcore-medusa")
    names = zipfile.ZipFile(here.wheel("draftcore-medusa")).namelist()
    assert "draftcore_medusa/py.typed" in names
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"draftcore_medusa", "draftcore_medusa-0.1.0.dist-info"}
    run = new_run("medusa", num_heads=3)
    here.draftcore("train", run.yaml)
    assert run.manifest(2, "medusa") == MEDUSA
    report = json.loads(here.draftcore("eval", run.yaml, "--json"))
    assert report["lossless"] is True
    assert report["num_drafts"] == 3
    here.draftcore("export", run.yaml)
    export = run.folder / "export"
    assert MEDUSA in json.loads((export / "draftcore.json").read_text())["plugins"]
    assert json.loads((export / "config.json").read_text())["model_type"] == "medusa"

    project = shutil.copytree(PROJECT, tmp_path / "project")
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('version = "0.1.0"', 'version = "0.2.0"'))
    here.install_editable(project)
    assert f"editable: {project}" in here.draftcore("list-plugins")
    here.draftcore("train", run.yaml, "train.epochs=2")
    newer = {"version": "0.2.0", "origin": f"editable: {project}"}
    assert run.manifest(4, "medusa") == {**MEDUSA, **newer}
