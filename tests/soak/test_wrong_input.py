"""Wrong configurations and command lines at random: each is refused in words, soon, before any work."""

import json
import os
import random
import re
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from click.testing import CliRunner
from draftcore_data.options import DataOptions
from draftcore_domino.options import DominoOptions
from draftcore_eagle3.options import Eagle3Options
from draftcore_eval.options import EvalOptions
from draftcore_hf.options import TargetOptions
from pydantic import BaseModel

from draftcore.cli import main
from draftcore.config import RunConfig
from tests.drills import Drill, altered
from tests.together.conftest import Project, make_project

LONG = "9" * 5000
OTHER = ["[]", "{}", "[1, 2]", "{a: 1}", '""', "2026-11-22", "a b", LONG]
NUMBER = [*OTHER, "true", "no", '"3"', ".inf", "-.inf", ".nan", "1e999", "-1", "1e30"]
TEXT = ["[]", "{}", "3", "0.5", "true", "[a]", "{a: b}"]
WRONG: dict[Any, list[str]] = {
    int: [*NUMBER, "1.5", "2.0", f"{10**12}", f"{10**30}", "!int 3"],
    float: [*NUMBER, "1.5.2", '"0.5"'],
    bool: (answer := [*OTHER, "0", "1", "0.5", '"true"', "perhaps"]),
    Literal: answer,
    str: TEXT,
    Union: ['"often"', "-1", "2", "[]", "{}", ".nan", LONG],  # of words or a share
    Path: ["", '""', ".", "/", *TEXT],
    tuple: ["3", "true", '"a"', "[true]", "[.nan]", '["3"]', f"[{LONG}]", "[[1]]", "{}"],
    dict: ["3", "true", '"a"', "[a]", "{a: 3}", "{a: {}}", "{a: 1, a: 2}"],
}
ALGORITHMS: dict[str, type[BaseModel]] = {"eagle3": Eagle3Options, "domino": DominoOptions}
# The sections of a run that plugins read.
SECTIONS: dict[str, type[BaseModel]] = {
    "target.": TargetOptions,
    "data.": DataOptions,
    "eval.": EvalOptions,
}
STORES = (
    "file:", "file:a%00b", "file://host/a", "file:a?volatile=yes&volatile=no", "file:a?x=1", "auto",
    "file:a?max_bytes=1&max_bytes=2", f"file:a?max_bytes={LONG}", "file:a?max_bytes=-1", "FILE:a",
    "file:a?max_bytes=9EiB", "mooncake://?x", "nope:a", '":"', "file:a??", "?", "3",
)  # fmt: skip
CHANNELS = ("tcp:", "tcp://", "tcp://a", "tcp://a:99999", f"tcp://a:{LONG}", "tcp:1:2", "tpc", "3")
DATA = (
    "[a.jsonl]", "[]", "[{source: a.jsonl, weight: 0}]", "nobody://a", "hf:a?split=b&split=c",
    "hf:a?x=1", "a.jsonl", '""', "a.jsonl?split=a", "eval.jsonl?x",
    "pipe", "/dev/zero", "[eval.jsonl, pipe]",
)  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    return make_project(tmp_path, target_folder)


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield each key of a model with its type, and whether it may be null."""
    for name, info in model.model_fields.items():
        found = [one for one in get_args(info.annotation) if one is not NoneType]
        optional = NoneType in get_args(info.annotation)
        kind = found[0] if optional else info.annotation
        while hasattr(kind, "__metadata__"):
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}", get_origin(kind) or kind, optional


def of_a_run() -> Iterator[tuple[str, Any, bool]]:
    """Yield each key of a run's configuration, as `fields` does."""
    yield from fields(RunConfig)
    for path, model in SECTIONS.items():
        yield from fields(model, path)


def wrong_values(project: Project, dice: random.Random) -> list[str]:
    takes_all = {"data.template_options", "data.eval"}  # the latter is read by who evaluates
    every = [field for field in of_a_run() if field[0] not in takes_all]
    of_run: list[Any] = [([], *field) for field in every]
    of_drafts: list[Any] = [
        (["algorithm.options={}", f"algorithm.name={name}"], *field)
        for name, model in ALGORITHMS.items()
        for field in fields(model, "algorithm.options.")
    ]
    before, key, kind, optional = dice.choice(dice.choice([of_run, of_drafts]))
    wrong = WRONG[kind] + ["null", ""] * (not optional and kind is not dict)
    return ["train", str(project.yaml), *before, f"{key}={dice.choice(wrong)}"]


def wrong_keys(project: Project, dice: random.Random) -> list[str]:
    names = {name for name, *_ in of_a_run() if not name.endswith("options")}
    name, other = dice.choice(sorted(names)), dice.choice(string.printable[:94])
    at, deep = dice.randrange(len(name)), ".".join("a" * 3000)
    ways = {name[:at] + other + name[at + 1 :], name + other, f"{name}.a.b", name[:at], deep}
    key = dice.choice(sorted({*ways, name.upper(), f"{name}.{name}"} - names))
    return ["train", str(project.yaml), f"{key}={dice.choice(['1', 'true', 'x', '[]'])}"]


def wrong_uris(project: Project, dice: random.Random) -> list[str]:
    return dice.choice([
        ["capture", str(project.yaml), f"store={dice.choice(STORES)}"],
        ["produce", str(project.yaml), f"channel={dice.choice(CHANNELS)}"],
        ["train", str(project.yaml), f"data.train={dice.choice(DATA)}", "store=auto"],
    ])  # fmt: skip


def wrong_files(project: Project, dice: random.Random) -> list[str]:
    """Write what is no configuration, or one that no draft was trained by."""
    text = yaml.safe_dump(project.config)
    lines = text.splitlines(keepends=True)
    at, one, deep = dice.randrange(len(text)), dice.randrange(len(lines)), dice.choice("[{-?")
    ways = [
        text[:at] + dice.choice(string.printable) + text[at + 1 :], text[:at], text[at:],
        text + dice.choice(lines), "".join(lines[:one] + lines[one + 1 :]), f"{text}---\n{text}",
        f"{deep} a: " * dice.randrange(1, 9999), deep * 99999, text + "? {}\n",
        f"a: &a [*a]\n{text}", f"{text}x: !!python/name:os.system\n", f"{text}<<: {{run: b}}\n",
    ]  # fmt: skip
    made = dice.choice(ways).encode()
    project.yaml.write_bytes(made + dice.randbytes(9) if dice.random() < 0.1 else made)
    return [dice.choice(["eval", "export"]), str(project.yaml)]


def wrong_lines(project: Project, dice: random.Random) -> list[str]:
    """Return a command line with an option, a file or a number that is wrong."""
    files = [str(file) for file in project.folder.rglob("*") if file != project.yaml]
    text = ["", "-1", "nan", LONG, "\u00e9\udcff", "nowhere/x", "/dev/null", "/dev/zero", "--json"]
    number = ["", "-1", "-inf", "nan", "1e999", LONG, "x", "0x1"]
    known = {
        "eval": "--draft --checkpoint --export --nope", "export": "--draft --checkpoint --layout",
        "train": "--role --draft --trainer -x", "overfit": "--row --steps --minutes --lr", "trian": "--json",
        "verify": "--target --server --run --prompts", "check-plugin": "--uri --jsn", "status": "--seconds",
        "new-plugin": "--nope", "list-plugins": "--nope", "hooks": "--nope",
    }  # fmt: skip
    verb = dice.choice(list(known))
    configured = verb in ("eval", "export", "train", "overfit", "status")
    line = [verb, str(project.yaml) if configured else dice.choice(text[:6])]
    for option in dice.choices(known[verb].split(), k=dice.randrange(1, 4)):
        numeric = verb in ("overfit", "status")
        line += [option, dice.choice(number if numeric else [*text, *files])]
    return [*(["--plugin", dice.choice([*text, *files])] if dice.random() < 0.1 else []), *line]


@pytest.mark.parametrize("kind", [wrong_values, wrong_keys, wrong_uris, wrong_files, wrong_lines])
def test_what_is_wrong_is_refused_in_words_before_any_work(
    project: Project, drill: Drill, kind: Callable[..., list[str]]
) -> None:
    there = sorted(project.folder.iterdir())
    for case in drill.cases(f"wrong input: {kind.__name__[6:]}"):
        line = kind(project, case.dice)
        for made in {*project.folder.iterdir()} - {*there} if kind is wrong_values else ():
            shutil.rmtree(made, ignore_errors=True)  # of one before that was not refused
        with case:
            result = CliRunner().invoke(main, line)
            case.outcome = "refused in words"
            case.shown = " ".join(f"{part:.200}" for part in line) + f"\n{result.output[-5000:]}"
            if not isinstance(result.exception, SystemExit | None):
                raise result.exception
            assert result.exit_code in (1, 2)
            assert "rror: " in result.output
            assert len(result.output) < 20_000
            assert kind is wrong_uris or sorted(project.folder.iterdir()) == there


def test_an_odd_row_is_left_out_by_its_line_or_is_one_that_can_be_learned(
    project: Project, drill: Drill
) -> None:
    """Among two dozen others; more bad ones than a tenth would end the run."""
    rows = Path("train.jsonl").read_text().splitlines()
    for case in drill.cases("wrong input: rows"):
        dice = case.dice
        row = dice.choice([json.loads(rows[0]), {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}])
        text = json.dumps(altered(dice, row))
        cut = dice.randrange(1, len(text))  # an empty line is no row
        digits = re.sub(r"(?<=[:\[,] )\d+|(?<=: )\S+", LONG, text, count=1)
        odd = dice.choice([text, text, text, text[:cut], digits, f"{text[:cut]}\0{text[cut:]}"])
        at = dice.randrange(len(rows))
        with case:
            made = "\n".join([*rows[:at], odd, *rows[at:]]).encode() + b"\n"
            Path("train.jsonl").write_bytes(made.replace(b"\0", dice.choice([b"\0", b"\xff"])))
            shutil.rmtree("run", ignore_errors=True)
            result = project.cli("train", "store=auto", "train.max_steps=1", ok=False)
            case.shown = f"{odd:.500}\n{result.output[-2000:]}"
            if not isinstance(result.exception, SystemExit | None):
                raise result.exception
            kept = json.loads(Path("run/data/train/dataset.json").read_text())["summary"]["samples"]
            assert (result.exit_code, kept - len(rows)) in ((0, 0), (0, 1))
            if kept == len(rows):
                case.outcome = "refused in words"
                assert f"train.jsonl:{at + 1}" in result.output
