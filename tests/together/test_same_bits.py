"""One run in every way that there is: its losses and weights are the same to the bit.

Of five drafts at once; features captured here, kept, or captured by producers; whole or resumed. On a
CPU only ranks, which add up in another order, may differ in the last bits.
"""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import draftcore
from draftcore.config import RESERVED
from draftcore.errors import ExitStatus
from tests.ranks import listening
from tests.together.conftest import BLOCKS, ODD, OPTIONS, WAIT, NewProject, Project, Start

# Seven batches, of five to one rows as tokens cut them, make steps of 2, 2, 2 and 1.
TRAIN: dict[str, Any] = {
    "batch": 6, "batch_tokens": 208, "accumulate": 2, "epochs": 3, "schedule": "constant",
    "warmup_ratio": 0.0, "eval_every": 6, "eval_samples": 3, "eval_prompts": 0,
}  # fmt: skip
STEPS, COSINE = 12, {"schedule": "cosine", "warmup_ratio": 0.2}
EPOCH = {"epochs": 1, "eval_every": 2}
DRAFTS: dict[str, Any] = {
    "eagle": {"algorithm": {"name": "eagle3", "options": OPTIONS["eagle3"]}, "train": COSINE},
    "blocks": {"algorithm": {"name": "dflash", "options": BLOCKS}, "train": {"lr": 0.002}},
    "domino": {
        "algorithm": {"name": "domino", "options": OPTIONS["domino"]},
        "train": {"clip": 0.3},
    },
    # These ask for the target's likeliest tokens, more or fewer, and for embeddings.
    "odd": {"algorithm": {"name": "odd", "options": {"topk": 3}}},
    "wide": {"algorithm": {"name": "odd", "options": {"topk": 6}}},
}
SHM = Path("/dev/shm")
HALT = """
import os, time
from pathlib import Path
from draftcore import hookimpl

@hookimpl
def step_finished(step):
    wanted, there = Path(os.environ["HALT"]), Path(os.environ["HALT"] + "-there")
    if wanted.exists() and step >= int(wanted.read_text()):
        wanted.rename(there)
        while there.exists():
            time.sleep(0.002)
"""


def make_whole(new_project: NewProject, folder: Path, **changes: Any) -> Project:
    """The run of all drafts."""
    chosen = {"algorithm": None, "drafts": DRAFTS, "store": "auto", "samples": 26, **changes}
    return new_project(
        folder, plugins=[ODD], **{**chosen, "train": {**TRAIN, **chosen.get("train", {})}}
    )


def make_alone(new_project: NewProject, folder: Path, label: str, **changes: Any) -> Project:
    """The run of one of the drafts, the settings overlaid with the draft's own."""
    draft = DRAFTS[label]
    train = {**draft.get("train", {}), **changes.pop("train", {})}
    return make_whole(
        new_project, folder, drafts={}, algorithm=draft["algorithm"], train=train, **changes
    )


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> Project:
    """That run in one process, from captures to the end without a stop."""
    project = make_whole(new_project, tmp_path_factory.mktemp("whole"))
    output = project.cli("train").output
    assert "eagle: a draft of 1 layer of width " in output
    for label in DRAFTS:
        assert f"{label}: complete: step {STEPS} of {STEPS}, 78 samples" in output
    return project


def require_same(found: Project, whole: Project, label: str, of: str | None = None) -> None:
    """Compare a draft's losses, held-out losses and weights; `of` is its label in the other run."""
    at = label if of is None else of
    assert len(whole.losses(label)) == STEPS
    assert found.losses(at) == whole.losses(label)
    assert found.evaluations(at) == whole.evaluations(label) != []
    ours, theirs = found.tensors(at), whole.tensors(label)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("label", ["eagle", "domino", "wide"])
def test_each_draft_is_as_it_would_have_been_alone(
    tmp_path: Path, new_project: NewProject, whole: Project, label: str
) -> None:
    """`odd` and `blocks` are alone below."""
    alone = make_alone(new_project, tmp_path, label)
    alone.cli("train")
    require_same(alone, whole, label, "")


def test_features_that_are_kept_are_stored_once_and_train_the_same_anywhere(
    tmp_path: Path, new_project: NewProject, whole: Project
) -> None:
    """Three epochs read what is captured again in each otherwise; by processes without the data."""
    first = make_whole(new_project, tmp_path / "first", store=f"file:{tmp_path}/first/features")
    assert "captured 26 samples" in first.finish("capture")
    features = tmp_path / "first" / "features"
    assert json.loads((features / "manifest.json").read_text())["request"]["layers"] == [1, 2, 3, 4]
    shards = list(map(load_file, features.glob("shard-*.safetensors")))
    once = ("1", "2", "3", "4", "last", "embeddings", "topk logits", "topk ids", "tokens", "mask")
    assert sum(map(len, shards)) == 26 * len(once)

    shutil.move(features, tmp_path / "moved")
    kept = {"store": f"file:{tmp_path}/moved"}
    elsewhere = make_whole(new_project, tmp_path / "elsewhere", **kept)
    (tmp_path / "elsewhere" / "train.jsonl").unlink()
    elsewhere.finish("train", "data.train=null")
    for label in DRAFTS:
        require_same(elsewhere, whole, label)
    narrow = make_alone(new_project, tmp_path / "narrow", "odd", **kept)
    narrow.cli("train", "data.train=null")
    require_same(narrow, whole, "odd", "")
    more = narrow.cli("train", f"run={tmp_path}/more", "algorithm.options.topk=7", ok=False)
    assert "topk: 7 here, 6 in the store" in more.output


# ---------------------------------------------------------------- producers


@pytest.mark.parametrize("way", ["auto and tcp", "file and dir"])
def test_producers_change_no_bit_and_nothing_is_left_of_them(
    tmp_path: Path, new_project: NewProject, whole: Project, way: str
) -> None:
    """Nor does another machine reach any of their processes."""
    changes: dict[str, Any] = {"topology": {"producers": 2}}
    if way == "file and dir":
        places = {"store": f"file:{tmp_path}/features", "channel": f"dir:{tmp_path}/channel"}
        project = make_alone(new_project, tmp_path / "apart", "blocks", **places, **changes)
    else:
        project = make_whole(new_project, tmp_path / "apart", **changes)
    process, hosts, output = project.start("train"), set[str](), ""
    while process.returncode is None:
        hosts |= {host for host, _ in listening(process.pid)}
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=0.5)
    assert process.returncode == 0, output
    assert hosts <= {"127.0.0.1"}
    run_id = json.loads((project.run / "run.json").read_text())["run_id"]
    assert not [path for path in SHM.iterdir() if run_id in path.name]
    for label in ["blocks"] if way == "file and dir" else DRAFTS:
        require_same(project, whole, label, None if way == "auto and tcp" else "")
    logs = [log.read_text() for log in sorted((project.run / "logs").glob("producer-*.log"))]
    assert len(logs) == 2
    captured = sum(int(log.split(";")[-1].split()[0]) for log in logs)
    assert captured == 78
    if way == "auto and tcp":
        assert f"captured {captured}, held 0 B" in " ".join(output.split())  # a terminal wraps it
    labels = DRAFTS if way == "auto and tcp" else ()
    assert {path.name for path in project.run.iterdir()} <= {*RESERVED, *labels, ".lock"}


# ---------------------------------------------------------------- stopped, killed and resumed


def halt(project: Project, monkeypatch: pytest.MonkeyPatch, *arguments: str, **more: Any) -> Any:
    """Start `train` and let it stand still after the next step; returns the process, and lets it go on."""
    wanted = project.folder / "halt"
    wanted.write_text(str(steps(project) + 2))
    monkeypatch.setenv("HALT", str(wanted))
    process, there = project.start("train", *arguments, **more), Path(f"{wanted}-there")
    deadline = time.monotonic() + WAIT
    while not there.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process, there.unlink


def steps(project: Project) -> int:
    return max((len(project.losses(label)) for label in ("", *DRAFTS)), default=0)


def test_a_run_that_was_hung_up_on_stopped_and_killed_goes_on(
    tmp_path: Path, new_project: NewProject, whole: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each draft from its own checkpoint, where one was killed before it could save."""
    (tmp_path / "halt.py").write_text(HALT)
    project = make_whole(new_project, tmp_path / "project")
    project.plugins = [ODD, tmp_path / "halt.py"]
    for producers in ("topology.producers=1", "topology.producers=0"):
        there, here = pty.openpty()
        terminal: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), here)
        terminal["start_new_session"] = True
        terminal["preexec_fn"] = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
        process, go_on = halt(project, monkeypatch, producers, **terminal)
        os.close(here)
        os.close(there)
        go_on()
        assert process.wait(WAIT) == 130
        assert (project.run / f"odd/checkpoints/step-{steps(project):08}/COMPLETE").exists()

    process, go_on = halt(project, monkeypatch)
    process.terminate()
    go_on()
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 130, output
    assert f"odd: interrupted: step {steps(project)} of {STEPS}" in output

    process, _ = halt(project, monkeypatch)
    process.kill()
    process.communicate()
    saved = sorted((project.run / "eagle" / "checkpoints").glob("step-*"))
    shutil.rmtree(saved[-1])
    before, label = int(saved[-2].name.removeprefix("step-")), "eagle"
    assert f"{label}: resuming from step {before} of {STEPS}" in project.cli("train").output
    for label in DRAFTS:
        require_same(project, whole, label)


def test_a_killed_capture_goes_on_without_doing_a_sample_twice(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "capture", samples=400)
    features = tmp_path / "capture" / "features"

    def shards() -> set[Path]:
        return set(features.glob("shard-*.safetensors"))

    process = project.start("capture")
    while len(shards()) < 10:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    process.kill()
    process.communicate()
    first = shards()
    assert len(first) < 100, "the capture ended before it was killed"
    output = project.cli("capture").output
    ids = [{name.rsplit("/", 1)[0] for name in load_file(shard)} for shard in shards()]
    assert sum(map(len, ids)) == len(set().union(*ids)) == 400
    assert len(first & shards()) >= 9, "what was captured before the kill was kept"
    assert "captured 400 samples" not in output
    assert not list(features.glob("*.tmp*"))
    project.cli("train", "train.max_steps=1")


# ---------------------------------------------------------------- ranks


def require_close(found: Project, whole: Project, label: str, of: str | None = None) -> None:
    """Compare within rounding."""
    at = label if of is None else of
    assert found.losses(at) == pytest.approx(whole.losses(label), rel=1e-5)
    pairs = zip(found.evaluations(at), whole.evaluations(label), strict=True)
    assert all(ours == pytest.approx(theirs, rel=1e-5) for ours, theirs in pairs)
    for file in ("draft", "optimizer"):
        ours, theirs = found.tensors(at, file), whole.tensors(label, file)
        for name in theirs.keys() - {"rng.cpu"}:
            # Updates are lr-sized, and Adam's division makes noise of near-zero gradients.
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=3e-5)


@pytest.fixture(scope="session")
def epoch(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> Project:
    """One epoch of it, in one process."""
    project = make_whole(new_project, tmp_path_factory.mktemp("epoch"), train=EPOCH)
    project.cli("train")
    return project


@pytest.mark.parametrize("shard", [False, True], ids=["replicas", "sharded"])
def test_two_ranks_give_the_update_of_one(
    tmp_path: Path, new_project: NewProject, epoch: Project, start: Start, shard: bool
) -> None:
    """Of the last step, which is of a single batch, rank 1 lacks all."""
    two = make_whole(new_project, tmp_path / "two", train={**EPOCH, "shard": shard})
    ranks = start(two)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert "odd: complete: step 4 of 4, 26 samples" in ranks.output(0)
    assert ranks.output(1) == ""
    for label in DRAFTS:
        require_close(two, epoch, label)


def test_the_number_of_ranks_may_change(
    tmp_path: Path, new_project: NewProject, whole: Project
) -> None:
    """Two and a producer, started from Python; two of torchrun's own making; then one alone."""
    project = make_alone(new_project, tmp_path / "changing", "blocks")
    done = draftcore.train(
        project.yaml, "topology.ranks=2", "topology.producers=1", "train.max_steps=4"
    )
    assert (done.reason, done.checkpoints[""].name) == ("complete", "step-00000004")
    assert "resuming from step 4 of 8" in project.torchrun("train.max_steps=8")
    assert f"resuming from step 8 of {STEPS}" in project.cli("train").output
    require_close(project, whole, "blocks", "")


def test_ranks_that_were_stopped_or_killed_go_on_to_the_same_bits(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    """Each rank's random numbers too. SIGINT to one rank stops both; so does the death of one."""
    dropout = tmp_path / "dropout.py"
    dropout.write_text(ODD.read_text().replace("DROPOUT = 0.0", "DROPOUT = 0.5"))
    changes = {"samples": 80, "algorithm": {"name": "odd", "options": {}}, "plugins": [dropout]}
    train = {"batch": 2, "accumulate": 2, "rank_timeout": 30, "eval_prompts": 0}
    straight = new_project(tmp_path / "straight", **changes, train={**train, "eval_every": 9})
    ranks = start(straight)
    assert ranks.finish() == [0, 0], ranks.output(0) + ranks.output(1)

    broken = new_project(tmp_path / "broken", **changes, train=train)
    ranks = start(broken)
    ranks.until(lambda: steps(broken) >= 5)
    ranks.send(1, signal.SIGINT)
    assert ranks.finish() == [130, 130], ranks.output(0)
    stopped = steps(broken)
    assert stopped < 20, "the run ended before it was stopped"
    assert f"interrupted: step {stopped} of 20" in ranks.output(0)

    ranks = start(broken)
    ranks.until(lambda: steps(broken) >= stopped + 4)
    ranks.send(1, signal.SIGKILL)
    assert ranks.finish() == [ExitStatus.RANK_LOST, -signal.SIGKILL], ranks.output(0)
    assert f"resuming from step {stopped} of 20" in ranks.output(0)
    assert "error: another rank failed\n  it was killed" in ranks.output(0)
    assert steps(broken) < 20, "the run ended before it was killed"

    ranks = start(broken)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert broken.losses() == straight.losses()
    for file in ("draft", "optimizer"):
        ours, theirs = broken.tensors("", file), straight.tensors("", file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["rng.cpu"], ours["rng.cpu.1"])
