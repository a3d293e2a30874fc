"""The README's run is trained and measured, by its function and by the verb; its table is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from draftcore_eval.options import EvalOptions
from draftcore_eval.verb import evaluate, verb
from draftcore_sdk.targets import conversations

import draftcore

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
