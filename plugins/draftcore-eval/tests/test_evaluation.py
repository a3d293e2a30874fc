"""The dist passes its suites, does what its README says, and refuses what cannot be measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import yaml
from click.testing import CliRunner
from draftcore_eval import report
from draftcore_eval.api import evaluate
from draftcore_eval.evaluation import Decoding
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded, Report
from draftcore_eval.verb import verb
from draftcore_sdk.evaluations import EvaluationSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite
from draftcore_sdk.targets import byte_tokenizer, conversations
from draftcore_sdk.wrappers import ObserverSuite

import draftcore
from draftcore import open_run
from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import OpenDraft
from draftcore.errors import DraftcoreError, UsageError


class TestPlugin(PluginSuite):
    plugin = "draftcore_eval.plugin"


class TestDecoding(EvaluationSuite):
    plugin = "draftcore_eval.plugin"
    options: ClassVar = {"max_new_tokens": 8, "batch": 2}


class TestEager(RunnerSuite):
    plugin = "draftcore_eval.plugin"


class TestCurvesPlugin(PluginSuite):
    plugin = "draftcore_eval.curves:plugin"


class TestCurves(ObserverSuite):
    plugin = "draftcore_eval.curves:plugin"


def test_the_plot_of_a_weak_draft_fills_its_axis_and_says_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(report, "save", lambda figure, file: drawn.append(figure))
    about = {"algorithm": "eagle3", "target": "/models/tiny", "data": "/data/a.jsonl, b.jsonl"}
    for accepted in (0, 19):  # of 20 rounds of one prompt
        decoded = Decoded([1], [0] * 50, [1] * accepted + [0] * (20 - accepted), [1] * 20)
        times = {"draft_seconds": 1.0, "verify_seconds": 1.0, "plain_seconds": 1.0}
        of: Any = {"about": about, "lossless": True, "ties": (), **times}
        report.plot({"": Report.count([decoded], 1, 1, **of)}, tmp_path / "plot.png")
    weak, strong = (figure.axes[0] for figure in drawn)
    assert (weak.get_ylim()[1] < 0.1, strong.get_ylim()[1]) == (True, 1)
    assert weak.get_title() == "eagle3 · tiny · a.jsonl, b.jsonl"


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


def test_an_evaluation_in_which_nothing_is_drafted_or_an_answer_has_no_room_is_an_error(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was measured where the target ends each answer with its first token."""
    nothing = SimpleNamespace(rounds=0)
    monkeypatch.setattr("draftcore_eval.evaluation.evaluate_prompts", lambda *given: nothing)
    draft = cast(OpenDraft, Alone(run))
    with pytest.raises(DraftcoreError, match="5 prompts with the first token: nothing was drafted"):
        run.evaluation().evaluate(draft, new_draft(), {"step": 1})
    long = Decoding(run, EvalOptions(max_new_tokens=600))
    for work in (
        lambda: long.evaluate(draft, new_draft(), {}), lambda: long.in_training(draft)(new_draft())
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"max_new_tokens=600 take \d+ positions.* has 512\n"):
            work()


# ------------------------------------------------------------ the README

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
(RUN,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
(CODE,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
TABLE = re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE)
FIGURES = re.findall(r"^\| (\w[\w /%-]+?) \| ", README.partition("| figure |")[2], re.MULTILINE)
WORDS = {"all": None, "by dtype": None}


def test_the_readmes_run_is_measured_as_it_says(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    conversations(Path("conversations.jsonl"), 4)
    conversations(Path("held-out.jsonl"), 3)
    settings = yaml.safe_load(RUN)
    settings["target"] |= {"path": str(target_folder), "device": "cpu"}
    settings["train"] |= {"batch": 2, "device": "cpu", "eval_every": 1, "eval_prompts": 2}
    settings["eval"]["max_new_tokens"] = 6
    settings["algorithm"]["options"] = {"layers": [0, 2, 4]}
    Path("run.yaml").write_text(json.dumps(settings))
    draftcore.train("run.yaml", say=print)
    lines = map(json.loads, Path("runs/my-draft/metrics.jsonl").read_text().splitlines())
    beside = [line["evaluation"] for line in lines if "evaluation" in line]
    assert [{"loss", "acceptance_length"} <= report.keys() for report in beside] == [True, True]

    capsys.readouterr()
    exec(CODE, names := dict[str, object]())
    *table, last = capsys.readouterr().out.splitlines()
    (report,) = [names["report"]]
    assert last.startswith(f"{report.acceptance_length} ")  # type: ignore[attr-defined]
    shown = [line.partition("  ")[0] for line in table]
    assert set(FIGURES) - {"95 % interval"} <= set(shown)
    assert {p.name for p in Path("runs/my-draft/eval").iterdir()} == {
        "acceptance.png", "report.json",
    }  # fmt: skip
    result = CliRunner().invoke(verb, ["run.yaml", "--json"], catch_exceptions=False)
    about = json.loads(result.stdout)["about"]
    assert about["step"] == 2
    assert about["versions"].keys() >= {"draftcore", "torch"}
    assert evaluate("run.yaml", "eval.prompts=1", say=lambda line: None)[0].prompts == 1


def test_the_table_lists_the_options_that_there_are_and_their_defaults() -> None:
    fields = EvalOptions.model_fields
    assert [name for name, _ in TABLE] == list(fields)
    for name, default in TABLE:
        said = WORDS[default] if default in WORDS else yaml.safe_load(default)
        assert said == fields[name].default
