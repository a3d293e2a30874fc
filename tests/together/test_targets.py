"""Targets of every architecture family, from their features to exports that servers read.

Each is tiny, with random weights, and made by transformers' own classes. In CI a few of them train one
algorithm; `nox -s full` takes all of them through all three.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from draftcore_sdk.targets import FAMILIES, tiny_target

from draftcore.cli import main
from tests.together.conftest import OPTIONS, NewProject, Project

# Of each of these one algorithm is trained in CI: attention, a cap, states, and a model that sees.
SHORT = {"gemma2": "eagle3", "qwen3_next": "eagle3", "falcon_h1": "dflash", "qwen3_vl": "domino"}
# Where a draft cannot copy the positions of its target, its option `rope_theta` gives it its own.
OWN_ROPE = {
    "gemma4",
    "nemotron_h",
    "kimi_linear",
    "gpt2",
    "jamba",
    "bloom",
    "mamba2",
    "deepseek_v4",
}
# What cannot be done: the verb that says so, and how.
REFUSED = {
    "gemma3n_text": ("capture", "gives states of shape"),
    "deepseek_v4": ("capture", "gives states of shape"),
    "longcat_flash": ("capture", "found no list of 6 decoder layers"),
    "bloom": ("eval", "cannot decode with target"),
    "jamba": ("eval", "cannot decode with target"),
    "minimax": ("eval", "cannot decode with target"),
    "mamba2": ("eval", "cannot decode with target"),
    "recurrent_gemma": ("eval", "cannot decode with target"),
    "paligemma": ("eval", "speculative decoding is not lossless"),
}


def cases() -> Sequence[object]:
    """Return (family, algorithms): the short ones, and all, which are long."""
    long = pytest.mark.long
    short = [pytest.param(family, (name,), id=f"{family}-{name}") for family, name in SHORT.items()]
    trained = [family for family in FAMILIES if family not in REFUSED]
    return short + [pytest.param(one, tuple(OPTIONS), id=one, marks=long) for one in trained]


def project_of(
    make_project: NewProject, folder: Path, family: str, algorithms: tuple[str, ...]
) -> Project:
    options = {name: OPTIONS[name].copy() for name in algorithms}
    rope = {"rope_theta": 10000} if family in OWN_ROPE else {}
    return make_project(
        folder,
        tiny_target(folder / "target", family),
        samples=8,
        algorithm=None,
        drafts={
            name: {"algorithm": {"name": name, "options": {**options[name], **rope}}}
            for name in algorithms
        },
    )


@pytest.mark.parametrize(("family", "algorithms"), cases())
def test_a_target_of_every_family_is_captured_trained_evaluated_exported_and_verified(
    tmp_path: Path, make_project: NewProject, family: str, algorithms: tuple[str, ...]
) -> None:
    project = project_of(make_project, tmp_path, family, algorithms)
    assert "captured 8 samples" in project.cli("capture").output
    assert "complete: step 2 of 2" in project.cli("train").output
    reports = json.loads(project.cli("eval", "--json").stdout)
    for name in algorithms:
        assert (reports[name]["lossless"], reports[name]["prompts"]) == (True, 3)
        project.cli("export", "--draft", name)
        folder, target = project.run / name / "export", project.config["target"]["path"]
        arguments = ["verify", str(folder), "--target", target, "--device", "cpu", "--json"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout), "a server reads it"


@pytest.mark.long
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_done_with_a_target_is_refused_with_what_can(
    tmp_path: Path, make_project: NewProject, family: str
) -> None:
    project, (verb, error) = (
        project_of(make_project, tmp_path, family, ("eagle3",)),
        REFUSED[family],
    )
    for before in ("capture", "train", "export")[: {"capture": 0, "eval": 3}[verb]]:
        project.cli(before)
    output = project.cli(verb, ok=False).output
    assert error in output
    assert "Traceback" not in output


def test_the_page_of_targets_lists_what_is_tried_and_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text()
    _, tried, refused = page.split("|---|---|")
    assert set(re.findall(r"`(\w+)`", tried.split("\n\n")[0])) == FAMILIES.keys() - REFUSED.keys()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", refused, re.MULTILINE)
    assert {family: (verb, error) for family, verb, error in rows} == REFUSED
    assert set(re.findall(r"`(\w+)`", page.split("positions of")[1].split(";")[0])) <= OWN_ROPE
