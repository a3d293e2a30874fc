"""A target whose files are damaged at random: trained on as it is, or refused with an error."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_sdk.targets import conversations, tiny_target

from draftcore.cli import main

if TYPE_CHECKING:
    from tests.conftest import Figures

VALUES: tuple[object, ...] = (None, -1, 0, 10**12, "x", [], {}, 1e400, [1, 2], True, 3)
ALGORITHM = {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    conversations(folder / "train.jsonl", 12)
    return tiny_target(folder / "target").parent


def damage(target: Path, draw: random.Random) -> str:
    """Damage one file, or say something else in it; returns what was done."""
    file = draw.choice(sorted(target.iterdir()))
    data = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "cut", "empty", "zeros", "gone", "noise", "lie"])
    if kind == "flip":
        for _ in range(draw.choice([1, 20])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "lie" and file.suffix == ".json":
        said = json.loads(data)
        said[draw.choice(list(said))] = draw.choice(VALUES)
        data = bytearray(json.dumps(said).encode())
    else:
        cut, noise = data[: draw.randrange(len(data))], bytearray(draw.randbytes(500))
        ways = {"cut": cut, "zeros": bytearray(len(data)), "noise": noise}
        data = ways.get(kind, bytearray())
    file.unlink()
    if kind != "gone":
        file.write_bytes(data)
    return f"{kind} of {file.name}"


def train(folder: Path, target: Path, steps: int) -> Result:
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(target)},
        "data": {"train": str(target.parent / "train.jsonl"), "max_length": 64},
        "algorithm": {"name": "eagle3", "options": ALGORITHM},
        "train": {"batch": 4, "max_steps": steps},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return CliRunner().invoke(main, ["train", str(folder / "run.yaml")])


def test_a_damaged_target_is_refused_or_is_another_target(
    good: Path, tmp_path: Path, cases: int, figures: Figures
) -> None:
    """Where it can be run, a run of the undamaged one does not go on with it."""
    found = {"refused": 0, "another target": 0, "the same": 0}
    assert train(tmp_path, good / "target", 1).exit_code == 0
    began = tmp_path / "run"
    for seed in range(cases):
        place = tmp_path / str(seed)
        shutil.copytree(good, place)
        what = f"seed {seed}: {damage(place / 'target', random.Random(seed))}"
        fresh = train(place, place / "target", 1)
        assert fresh.exception is None or isinstance(fresh.exception, SystemExit), what
        shutil.rmtree(place / "run", ignore_errors=True)
        shutil.copytree(began, place / "run")
        resumed = train(place, place / "target", 2)
        assert resumed.exception is None or isinstance(resumed.exception, SystemExit), what
        if fresh.exit_code:
            assert "error: " in fresh.output, f"{what}: {fresh.output}"
            assert resumed.exit_code, what
            found["refused"] += 1
        else:
            found["the same" if resumed.exit_code == 0 else "another target"] += 1
            same = (place / "target/model.safetensors").read_bytes()
            if resumed.exit_code == 0:
                assert same == (good / "target/model.safetensors").read_bytes(), what
        shutil.rmtree(place)
    figures("a file of the target", cases, ", ".join(f"{n} {kind}" for kind, n in found.items()))
