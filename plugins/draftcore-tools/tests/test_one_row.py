"""The samples `one-row`: a run whose only row stands in its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import draftcore
from draftcore.errors import UsageError

ROW = {"name": "one-row", "prompt": [5, 6, 7], "answer": [8, 9, 8]}


@pytest.fixture
def run(tmp_path: Path, target_folder: Path) -> Path:
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": ROW,
        "algorithm": {"name": "eagle3"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_its_answer_is_learned_its_prompt_is_asked_and_another_row_is_another_sample(
    run: Path,
) -> None:
    with draftcore.open_run(run) as opened:
        assert (opened.data.longest, opened.data.train) == (6, "one row")
        samples: Any = opened.data.samples("train")
        assert samples.tokens(0).tolist() == [5, 6, 7, 8, 9, 8]
        assert np.flatnonzero(samples.loss_mask(0)).tolist() == [2, 3, 4, 5]
        assert samples.summary.token_counts == {7: 1, 8: 2, 9: 1}
        assert opened.data.prompts().token_ids == [[5, 6, 7]]
    with draftcore.open_run(run, ["data.answer=[8, 9, 9]"]) as other:
        assert other.data.samples("train").feature_ids != samples.feature_ids


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.answer=[9999]", "the row has the token 9999"),
        ("data.answer=[]", "data.*answer|answer: .*at least 1"),
        ("data.answer=[-1]", "answer.0: .*greater than or equal to 0"),
    ],
)
def test_tokens_that_the_target_has_not_are_refused(run: Path, override: str, says: str) -> None:
    with pytest.raises(UsageError, match=says), draftcore.open_run(run, [override]) as opened:
        opened.data  # noqa: B018
