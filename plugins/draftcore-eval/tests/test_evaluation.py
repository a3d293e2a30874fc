"""The dist passes its suites; beside training, the first prompts are decoded by what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from draftcore_eval.evaluation import Decoding
from draftcore_eval.options import EvalOptions
from draftcore_sdk.evaluations import EvaluationSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite
from draftcore_sdk.targets import byte_tokenizer, conversations

from draftcore import open_run
from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import OpenDraft
from draftcore.errors import UsageError


class TestPlugin(PluginSuite):
    plugin = "draftcore_eval.plugin"


class TestDecoding(EvaluationSuite):
    plugin = "draftcore_eval.plugin"
    options: ClassVar = {"max_new_tokens": 8, "batch": 2}


class TestEager(RunnerSuite):
    plugin = "draftcore_eval.plugin"


@pytest.fixture
def run(target_folder: Path, tmp_path: Path) -> Iterator[Any]:
    settings = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"eval": str(conversations(tmp_path / "eval.jsonl", 5))},
        "algorithm": {"name": "eagle3"},
        "train": {"eval_prompts": 3},
        "eval": {"max_new_tokens": 7},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    with open_run(tmp_path / "run.yaml") as run:
        yield run


class Alone:
    """A draft of a run that needs no weights."""

    def __init__(self, run: Any) -> None:
        self.run, self.config, self.label = run, run.config, ""
        self.drafters = list[Draft]()

    def drafter(self, built: Draft) -> Any:
        self.drafters.append(built)
        return SimpleNamespace(draft=built)


def new_draft() -> Draft:
    return cast(Draft, SimpleNamespace(module=torch.nn.Linear(1, 1)))


def test_the_first_prompts_are_decoded_by_one_runner_as_long_as_the_draft_is_the_same(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has recorded reads the weights where they are; another draft's lie elsewhere."""
    asked: list[tuple[Any, list[list[int]], EvalOptions]] = []

    def decode(runner: Any, prompts: list[list[int]], options: EvalOptions) -> Any:
        asked.append((runner, prompts, options))
        return SimpleNamespace(acceptance_length=2.5)

    monkeypatch.setattr("draftcore_eval.evaluation.evaluate_prompts", decode)
    draft, first, other = Alone(run), new_draft(), new_draft()
    measure = run.evaluation().in_training(cast(OpenDraft, draft))
    assert not (run.folder / "data").exists(), "no row is rendered to decode"
    assert [measure(built) for built in (first, first, other)] == [{"acceptance_length": 2.5}] * 3
    assert [id(built) for built in draft.drafters] == [id(first), id(other)]
    assert len({id(runner) for runner, *_ in asked}) == 2
    assert {options.max_new_tokens for *_, options in asked} == {7}
    texts = [byte_tokenizer().decode(prompt) for prompt in asked[0][1]]
    assert [f"q{at}?" in text for at, text in enumerate(texts)] == [True] * 3
    assert all(text.endswith("<|im_start|>assistant\n") for text in texts)


def test_a_target_that_devices_share_is_refused_before_training(run: Any) -> None:
    decoding = Decoding(run, EvalOptions())
    run.target.devices = 2
    with pytest.raises(UsageError, match=r"cannot decode: set train.eval_prompts=0"):
        decoding.in_training(cast(OpenDraft, Alone(run)))
