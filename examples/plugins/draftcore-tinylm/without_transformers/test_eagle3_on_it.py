"""EAGLE-3 as it is, on a target that is not transformers', where no transformers is: `nox -s without`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftcore_eval.api import evaluate
from draftcore_tinylm.make import make
from safetensors.torch import load_file

import draftcore
from draftcore.errors import UsageError


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tinylm")
    make(made, steps=100, rows=600)
    return made


@pytest.fixture
def overrides(folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"run={tmp_path / 'run'}", f"target.path={folder}", f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}", "train.device=cpu", "target.device=cpu",
    ]  # fmt: skip


RUN = Path(__file__).parents[1] / "run.yaml"


def test_eagle3_trains_on_it_resumes_and_decodes_as_the_target_does(
    overrides: list[str], tmp_path: Path
) -> None:
    """Few steps, so that some drafts are refused, and what the target read of them has to be undone."""
    held_out = ["train.eval_every=18", "train.eval_samples=8", "train.eval_prompts=4"]
    overrides += [*held_out, "train.schedule=constant", "train.warmup_ratio=0"]  # of any total
    whole = draftcore.train(RUN, *overrides, "train.max_steps=36")
    parted = [*overrides, f"run={tmp_path / 'parted'}"]
    assert draftcore.train(RUN, *parted, "train.max_steps=18").reason == "complete"
    resumed = draftcore.train(RUN, *parted, "train.max_steps=36")
    files = [made.checkpoints[""] / "draft.safetensors" for made in (whole, resumed)]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), "to the bit"

    (report,) = evaluate(RUN, *overrides)
    assert report.lossless
    assert report.prompts == 50
    refused = sum(row["rounds"] for row in report.rows) * 5 - report.tokens
    assert 1.2 < report.acceptance_length < 4.5
    assert refused > 100
    (folder,) = draftcore.export(RUN, *overrides)
    (again,) = evaluate(RUN, *overrides, exported=folder)
    assert again.acceptance_length == report.acceptance_length
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 48
    make(other := tmp_path / "other", steps=1, rows=8)
    with pytest.raises(UsageError, match="target: weights"):  # another target is told from it
        draftcore.train(RUN, *parted, "train.max_steps=54", f"target.path={other}")


def test_it_says_what_is_missing(overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\(tinylm\) has no num_attention_heads"):
        draftcore.train(RUN, *overrides, "algorithm.options={layers: [0, 1, 2]}")
    with pytest.raises(UsageError, match=r"python -m draftcore_tinylm\.make"):
        draftcore.train(RUN, *overrides, f"target.path={tmp_path}")
