"""`draftcore served`: a draft that an engine serves as trained, and what it does where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from draftcore_eval.causes import Variants
from draftcore_eval.served import Asking, Served, compare
from draftcore_sdk.targets import tiny_target

import draftcore
from draftcore import load_plugins, open_draft, open_run
from draftcore.cli import main
from draftcore.errors import DraftcoreError

ENGINES = Path(__file__).with_name("wrong_engine.py")
LONGEST = 40  # tokens of an answer
DRAFTS: dict[str, tuple[dict[str, Any], int]] = {
    "eagle3": (
        {"layers": [1, 2, 4], "draft_vocab_size": 250, "ttt_length": 2, "num_drafts": 4}, 120,
    ),
    "dflash": ({"num_layers": 2, "layers": [1, 3], "block_size": 5, "num_anchors": 16}, 90),
}  # fmt: skip
# What each wrong engine's cause begins with.
CAUSES = {
    "lower-layers": "layers: the engine feeds the outputs [0, 1, 3], each one below",
    "other-rope": "rope base: the engine takes rope_theta for 1000000.0",
    "fed-back-normed": "norm_output: the engine takes norm_output for true",
    "no-norm": "norm: midlayer.hidden_norm is left out",
    "unread-norm": "norm: the weights of norm were not loaded",
    "unordered-rows": "row order: rows of q_proj and k_proj are as they are",
    "residual": "norm_before_residual: ",
    "vocabulary": "vocabulary: d2t is not read",
    "bfloat16": "dtype: the draft is computed in bfloat16",
    "quantised-head": "quantised: the head is in 4 bits",
    "fewer-drafts": "number of drafts: 3 of 4",
    "begins": "prompt: of its token ids",
    "causal": "causality: the engine takes is_causal for true",
    "mask-token": "mask token: the engine takes mask_token_id for 0",
    "short-block": "number of drafts: the block has 4 rows",
}
OF_BLOCKS = ("causal", "mask-token", "short-block")


@dataclass
class Trained:
    """A run whose draft was trained on the target's own answers to the eval prompts, and its export."""

    yaml: Path
    export: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("wide"), std=0.3)


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: train(name, target, tmp_path_factory.mktemp(name)) for name in DRAFTS}


def train(name: str, target: Path, folder: Path) -> Trained:
    """Train a draft until some of its drafts are accepted."""
    options, steps = DRAFTS[name]
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}?" * (1 + 9 * (i % 2) * (i > 3))}],
         "category": ("odd", "even")[i % 2]}
        for i in range(6)
    ]  # fmt: skip
    (asked := folder / "eval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {"eval": str(asked), "max_length": 256},
        "algorithm": {"name": name, "options": options},
        "train": {"batch": 3, "lr": 0.01, "epochs": steps, "max_steps": steps, "device": "cpu",
                  "checkpoint_every": steps, "eval_every": 0, "log_every": steps},
        "eval": {"max_new_tokens": LONGEST},
    }  # fmt: skip
    with open_run(config) as run:
        prompts = [list(ids) for ids in run.data.prompts().token_ids]
        answers = run.target.load_model().generate(prompts, LONGEST)
    learned = [
        {"input_ids": [*ids, *answer], "loss_mask": [0] * (len(ids) - 1) + [1] * (len(answer) + 1)}
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    (taught := folder / "train.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in learned))
    config["data"]["train"] = str(taught)
    (yaml := folder / "run.yaml").write_text(json.dumps(config))
    draftcore.train(yaml, say=lambda line: None)
    (export,) = draftcore.export(yaml, say=lambda line: None)
    return Trained(yaml, export)


@pytest.fixture(scope="module")
def served(trained: dict[str, Trained]) -> Iterator[Any]:
    """Compare a draft with a wrong engine; what each mistake decodes is decoded once for all engines."""
    registry, opened = load_plugins([ENGINES]), {}
    for name, one in trained.items():
        manager = open_run(one.yaml, (), registry)
        run: Any = manager.__enter__()
        draft, evaluation = run.drafts[0], run.evaluation()
        built, origin = open_draft(draft, None, None)
        prompts = evaluation.prompts_for(origin)
        variants = Variants(draft, one.export, prompts.token_ids, evaluation.options)
        opened[name] = manager, (draft, built, one.export, variants, prompts, evaluation.options)

    def compared(name: str, engine: str) -> Served:
        return compare(*opened[name][1], Asking(engine))

    yield compared
    for manager, _ in opened.values():
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("engine", CAUSES)
def test_each_mistake_of_an_engine_is_named(served: Any, engine: str) -> None:
    found = served("dflash" if engine in OF_BLOCKS else "eagle3", engine)
    assert not found.as_trained
    assert [cause for cause, _ in found.causes][:1] != [], found.to_json()
    assert found.causes[0][0].startswith(CAUSES[engine]), found.causes
    print([cause for cause, _ in found.causes], found.lengths(range(6)), found.first)
