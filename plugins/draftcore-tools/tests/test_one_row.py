"""The samples `one-row`: a run whose only row stands in its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from draftcore import open_run
from draftcore.errors import UsageError


@pytest.fixture
def run(tmp_path: Path, target_folder: Path) -> Path:
    target = {"path": str(target_folder), "device": "cpu"}
    row = {"name": "one-row", "prompt": [5, 6, 7], "answer": [8, 9, 8]}
    run = {"run": str(tmp_path), "target": target, "data": row, "algorithm": {"name": "eagle3"}}
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return file


def test_its_answer_is_learned_its_prompt_is_asked_and_another_row_is_another_sample(
    run: Path,
) -> None:
    with open_run(run) as opened:
        assert (opened.data.longest, opened.data.train) == (6, "one row")
        samples: Any = opened.data.samples("train")
        assert samples.tokens(0).tolist() == [5, 6, 7, 8, 9, 8]
        assert np.flatnonzero(samples.loss_mask(0)).tolist() == [2, 3, 4, 5]
        assert samples.summary.token_counts == {7: 1, 8: 2, 9: 1}
        assert opened.data.prompts().token_ids == [[5, 6, 7]]
    with open_run(run, ["data.answer=[8, 9, 9]"]) as other:
        assert other.data.samples("train").feature_ids != samples.feature_ids


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([9999], "the row has the token 9999"),
        ([], "data.*answer|answer: .*at least 1"),
        ([-1], "answer.0: .*greater than or equal to 0"),
    ],
)
def test_tokens_that_the_target_has_not_are_refused(run: Path, answer: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says), open_run(run, [f"data.answer={answer}"]) as opened:
        opened.data  # noqa: B018
