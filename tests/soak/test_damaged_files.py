"""Files that were damaged while nobody looked: what reads them comes to the same result, or names them."""

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from draftcore_disagg.tcp import TcpChannel

from draftcore.files import digest
from tests.drills import Drill
from tests.together.conftest import Project, make_project

GO_ON = "train train.max_steps=6"
WARM = f"{GO_ON} run=other algorithm.options.warm_start=run/export"
STORED = f"{GO_ON} run=other store=file:features data.train=null"
KINDS = {  # the files, and the verb that reads them
    "tensors of a checkpoint": ("run/checkpoints/*4/*.safetensors", GO_ON),
    "tensors, evaluated": ("run/checkpoints/*4/draft.safetensors", "eval --json"),
    "state of a checkpoint": ("run/checkpoints/*4/state.json", GO_ON),
    "manifest of a checkpoint": ("run/checkpoints/*4/COMPLETE", GO_ON),
    "rows of the dataset": ("run/data/train/rows.bin", GO_ON),
    "description of the dataset": ("run/data/train/dataset.json", GO_ON),
    "export, evaluated": ("run/export/*", "eval --json --export run/export"),
    "export, trained from": ("run/export/*", WARM),
    "id of the run": ("run/run.json", GO_ON),
    "metrics": ("run/metrics.jsonl", GO_ON),
    "features in a store": ("features/shard*", STORED),
    "manifest of a store": ("features/manifest.json", STORED),
}
OTHER = (b"", b"{}", b"[]", b"null", b"7", b'"x"', b'{"address": 5}', b"9" * 5000, b"[" * 9999)
VALUES: tuple[object, ...] = (None, -1, 0, 10**12, "x", [], {}, 1e400, [1, 2], True, 3)
# What is no file at all, in the place of one.
PLACED: dict[str, Callable[[Path], object]] = {
    "remove": lambda file: None,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file),
    "a device": lambda file: file.symlink_to("/dev/zero"),
}


def damage(file: Path, dice: random.Random) -> str:
    """Damage a file in one way; returns the way's name."""
    data = file.read_bytes()
    at, digits = dice.randrange(len(data)), [i for i, one in enumerate(data) if 48 <= one < 58]
    edited = dice.choice(digits or [at])
    swapped = [f for f in file.parent.parent.rglob(f"*{file.suffix}") if f.is_file() and f != file]
    flipped = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
    ways = {
        "flip a bit": flipped,
        "cut": data[:at],
        "lose a page": data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :],
        "append": data + dice.randbytes(9),
        "edit a digit": data[:edited] + b"%d" % ((data[edited] - 47) % 10) + data[edited + 1 :],
        "swap": dice.choice(swapped or [file]).read_bytes(),
        "other": dice.choice(OTHER),
    }
    way = dice.choice(["flip a bit", "flip a bit", "edit a digit", *ways, *PLACED])
    if way in PLACED:
        file.unlink()
        PLACED[way](file)
    else:
        file.write_bytes(ways[way])
    return way


def lie(file: Path, dice: random.Random) -> str:
    """Say something else in a file of JSON, or damage another one."""
    if file.suffix != ".json" or dice.random() < 0.5:
        return damage(file, dice)
    said = json.loads(file.read_bytes())
    said[key := dice.choice(list(said))] = dice.choice(VALUES)
    file.write_text(json.dumps(said))
    return f"another {key}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Project:
    """A run at step 4 of 6, with an export, and a store that holds all of its features."""
    folder = tmp_path_factory.mktemp("whole")
    changes: Any = {"run": "run", "store": "auto", "eval": {"max_new_tokens": 4, "prompts": 2}}
    changes["target"] = {"path": str(shutil.copytree(target_folder, folder / "target").name)}
    changes["train"] = {"schedule": "constant", "warmup_ratio": 0}  # alike for 4 steps and for 6
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        project = make_project(folder, target_folder, **changes)
        project.cli("train", "train.max_steps=4")
        project.cli("export")
        project.cli("capture", "store=file:features")
    return project


def outcome(project: Project, command: str) -> tuple[Any, str]:
    """What a verb came to, None where it refused, and what it printed. No traceback."""
    result = project.cli(*command.split(), ok=False)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    if result.exit_code:
        return None, result.output
    if command.startswith("eval"):
        report = json.loads(result.stdout)
        return [report[key] for key in ("acceptance_by_position", "tokens", "lossless")], ""
    made = Path("other" if "run=other" in command else "run") / "checkpoints/step-00000006"
    return [digest(made / name) for name in ("draft.safetensors", "optimizer.safetensors")], ""


@pytest.fixture
def copied(whole: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Return a fresh copy of the whole run, which is the current folder then."""

    def copy() -> Path:
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        monkeypatch.chdir(shutil.copytree(whole.folder, tmp_path / "copy"))
        return tmp_path / "copy"

    return copy


@pytest.fixture(scope="module")
def undamaged(whole: Project, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def result(command: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(shutil.copytree(whole.folder, tmp_path_factory.mktemp("as-it-is") / "run"))
            wanted, said = outcome(whole, command)
        assert wanted is not None, said
        return wanted

    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_leads_to_the_same_result_or_is_named(
    whole: Project, copied: Callable[[], Path], undamaged: Any, drill: Drill, kind: str
) -> None:
    files, command = KINDS[kind]
    wanted = undamaged(command)
    for case in drill.cases(f"damaged: {kind}"):
        folder = copied()
        file = case.dice.choice(sorted(folder.glob(files)))
        case.shown = f"{damage(file, case.dice)} of {file}"
        with case:
            found, said = outcome(whole, command)
            case.shown = f"{case.shown}\n{said}"
            if found is None:
                case.outcome = "refused in words"
                names = (file.name, str(file.parent), f"file:{file.parent.name}")
                assert any(name in said for name in names), "refused without its name"
            else:
                assert found == wanted


def test_a_damaged_target_is_refused_or_is_another_target(
    whole: Project, copied: Callable[[], Path], undamaged: Any, drill: Drill
) -> None:
    """Where it can be run, a run of the undamaged one does not go on with it."""
    wanted = undamaged(GO_ON)
    for case in drill.cases("damaged: a file of the target"):
        file = case.dice.choice(sorted(copied().glob("target/*")))
        way = lie(file, case.dice)
        with case:
            fresh, said = outcome(whole, f"{GO_ON} run=other store=auto")
            resumed, more = outcome(whole, GO_ON)
            case.shown = f"{way} of {file}\n{said}\n{more}"
            assert fresh is not None or "error: " in said
            assert resumed == wanted if resumed else "error: " in more
            assert fresh is not None or resumed is None, "it is trained on"
            case.outcome = "recovered" if resumed else "refused in words"


def test_a_damaged_address_of_the_queue_is_waited_out(
    whole: Project, copied: Callable[[], Path], drill: Drill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a producer whose patience is short here; the trainer writes the file anew."""
    monkeypatch.setattr(
        "draftcore_disagg.produce.open_channel", lambda run: TcpChannel.open("tcp", b"", 0.01)
    )
    copied()
    torn = [b'{"address": "127.0.0.1:1"}'[:at] for at in range(9)]
    for case in drill.cases("damaged: address of the queue"):
        Path("run/queue.json").write_bytes(made := case.dice.choice([*OTHER, *torn]))
        with case:
            found, said = outcome(whole, "produce")
            case.outcome, case.shown = "refused in words", made
            assert found is None
            assert "error: " in said
