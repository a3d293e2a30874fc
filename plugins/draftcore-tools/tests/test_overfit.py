"""`draftcore overfit`: a right algorithm learns one conversation, a wrong one says where it stopped."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from draftcore_sdk.targets import conversations

Overfit = Callable[..., Result]


@pytest.fixture
def overfit(
    tmp_path: Path, target_folder: Path, run_cli: Any, algorithm_options: dict[str, dict[str, Any]]
) -> Overfit:
    def start(algorithm: str, *arguments: str, plugin: Path | None = None, **run: Any) -> Result:
        config = {
            "run": str(tmp_path / "run"),
            "target": {"path": str(target_folder), "device": "cpu"},
            "data": {"train": str(conversations(tmp_path / "train.jsonl", 3))},
            "train": {"device": "cpu"},
            **(run or {"algorithm": {"name": algorithm, "options": algorithm_options[algorithm]}}),
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        loose = ["--plugin", plugin] if plugin else []
        return run_cli(*loose, "overfit", tmp_path / "run.yaml", *arguments)

    return start


def test_every_algorithm_learns_one_conversation_one_draft_after_the_other(
    overfit: Overfit, tmp_path: Path, algorithm_options: dict[str, dict[str, Any]]
) -> None:
    drafts = {
        name: {"algorithm": {"name": name, "options": options}}
        for name, options in algorithm_options.items()
    }
    result = overfit("", "--row", "2", drafts=drafts)
    assert result.exit_code == 0, result.output
    _, *parts = re.split(r"^(eagle3|dflash|domino):\n", result.stdout, flags=re.MULTILINE)
    assert parts[::2] == ["dflash", "domino", "eagle3"], "as YAML sorts them"
    for label, text in zip(parts[::2], parts[1::2], strict=True):
        lines = text.splitlines()
        assert lines[0] == "prompt of 22 tokens, the target's own answer has 49"
        looks = [line for line in lines if re.match(r"step +\d+: loss", line)]
        assert re.search(r"acceptance length (\d\.\d\d) of \1$", looks[-1])
        agrees = [line.partition(":")[0] for line in lines if ": agrees with" in line]
        assert agrees == (["sglang"] if label == "domino" else ["sglang", "vllm"])
        assert lines[-1].startswith("every draft is accepted")
    assert not (tmp_path / "run").exists(), "nothing is written into the run's folder"


def test_too_few_steps_say_that_training_stopped(overfit: Overfit) -> None:
    result = overfit("dflash", "--steps", "2", "--lr", "1e-6")
    assert result.exit_code == 1
    assert "dflash did not learn one conversation in 2 steps" in result.output
    assert "stopped at: training" in result.output
    assert "--lr" in result.output


def test_a_row_that_is_not_there_is_refused(overfit: Overfit) -> None:
    result = overfit("dflash", "--row", "3")
    assert result.exit_code == 1
    assert "stopped at: rendering" in result.output
    assert "has 3 rows, and row 3 was asked for" in result.output


# ---------------------------------------------------------------- wrong algorithms

LATE = """
from draftcore import hookimpl

@hookimpl(wrapper=True)
def drafter(draft, target, options):
    drafter = yield
    prefill, accept = drafter.prefill, drafter.accept

    def late(features):
        return {name: value.roll(1, 1) for name, value in features.items()}

    drafter.prefill = lambda state, tokens, lengths, given, last: prefill(
        state, tokens, lengths, late(given), last)
    drafter.accept = lambda state, tokens, given, counts: accept(state, tokens, late(given), counts)
    return drafter
"""
FORGETFUL = """
from draftcore import hookimpl

@hookimpl(wrapper=True)
def import_draft(folder, target, options):
    draft = yield
    draft.module.fc.weight.data.zero_()
    return draft
"""


@pytest.mark.parametrize(
    ("hook", "steps", "stage"), [(LATE, "128", "decoding"), (FORGETFUL, "64", "export")]
)
def test_a_wrong_algorithm_says_where_it_stopped(
    hook: str, steps: str, stage: str, overfit: Overfit, tmp_path: Path
) -> None:
    plugin = tmp_path / f"mistake_{stage}.py"
    plugin.write_text(hook)
    result = overfit("dflash", "--steps", steps, plugin=plugin)
    assert result.exit_code == 1
    assert f"stopped at: {stage}" in result.output
    assert "accepted by position" in result.output
