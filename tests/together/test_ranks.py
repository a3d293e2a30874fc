"""Several ranks: the update that one would have made, and an end to the run when one ends.

Ranks are real processes; one test starts torchrun.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from draftcore.cli import main
from draftcore.errors import ExitStatus
from tests.ranks import start_rank

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


ODD = Path(__file__).with_name("odd_algorithm.py")
BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
DRAFTS = {
    "eagle": {
        "algorithm": {
            "name": "eagle3",
            "options": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2},
        }
    },
    "blocks": {"algorithm": {"name": "dflash", "options": BLOCKS}},
    "domino": {
        "algorithm": {"name": "domino", "options": {**BLOCKS, "gru_hidden_dim": 16, "emb_dim": 8}}
    },
    "odd": {"algorithm": {"name": "odd"}},
}
Start = Callable[..., "Ranks"]


@dataclass
class Ranks:
    """The ranks of a run: their processes, what they printed, how they ended."""

    folder: Path
    processes: list[ForkServerProcess] = field(default_factory=list)

    def start(self, argv: list[str], size: int, largest_file: int | None = None) -> None:
        """Start the next rank."""
        rank = len(self.processes)
        process = start_rank(self.folder, rank, size, be_a_rank, argv, largest_file)
        self.processes.append(process)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output(0) + self.output(1)
            assert all(one.is_alive() for one in self.processes), self.output(0) + self.output(1)
            time.sleep(0.002)

    def finish(self) -> list[int | None]:
        """Wait for all ranks; returns their exit statuses."""
        for process in self.processes:
            process.join(300)
            assert not process.is_alive(), self.output(0) + self.output(1)
        return [process.exitcode for process in self.processes]

    def output(self, rank: int) -> str:
        return (self.folder / f"output.{rank}").read_text()


def be_a_rank(argv: list[str], largest_file: int | None) -> None:
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    main(argv)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start two ranks of `train`; `second` are the arguments of rank 1 where they differ."""
    started: list[Ranks] = []

    def start(
        project: Project,
        *arguments: str,
        plugin: Path | None = None,
        second: Sequence[str] | None = None,
        verb: str = "train",
        largest_file: int | None = None,
    ) -> Ranks:
        loose = ["--plugin", str(plugin)] if plugin else []
        folder = tmp_path / f"ranks-{len(started)}"
        folder.mkdir()
        ranks, words = Ranks(folder), [*loose, verb, str(project.yaml)]
        started.append(ranks)
        ranks.start([*words, *arguments], 2, largest_file)
        ranks.start([*words, *(arguments if second is None else second)], 2)
        return ranks

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()


def steps(project: Project, label: str = "") -> int:
    file = project.run / label / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def tensors(folder: Path, step: int, file: str = "draft") -> dict[str, torch.Tensor]:
    return dict(load_file(folder / f"checkpoints/step-{step:08d}/{file}.safetensors"))


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["evaluation"] for line in lines if "evaluation" in line]


@pytest.mark.parametrize("shard", [False, True], ids=["replicas", "sharded"])
def test_two_ranks_give_the_update_of_one(
    tmp_path: Path, new_project: NewProject, start: Start, shard: bool
) -> None:
    """Of steps of 5 batches, and one of a single batch, rank 1 lacks some or all."""
    changes = {"algorithm": None, "drafts": DRAFTS, "samples": 26, "store": "auto"}
    steps = {"batch": 1, "accumulate": 5, "eval_every": 3, "eval_samples": 3, "eval_prompts": 0}
    one = new_project(tmp_path / "one", **changes, train=steps)
    one.cli("train", plugin=ODD)
    two = new_project(tmp_path / "two", **changes, train={**steps, "shard": shard})
    ranks = start(two, plugin=ODD)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert "odd: complete: step 6 of 6, 26 samples" in ranks.output(0)
    assert ranks.output(1) == ""
    for label in DRAFTS:
        ours, theirs = two.run / label, one.run / label
        assert two.losses(ours) == pytest.approx(one.losses(theirs), rel=1e-5)
        for ours_at, theirs_at in zip(evaluations(ours), evaluations(theirs), strict=True):
            assert ours_at == pytest.approx(theirs_at, rel=1e-5)
        for file in ("draft", "optimizer"):
            found, wanted = tensors(ours, 6, file), tensors(theirs, 6, file)
            for name in wanted.keys() - {"rng.cpu"}:
                # Updates are lr-sized, and Adam's division makes noise of near-zero gradients.
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=3e-5)


def test_a_stopped_or_killed_run_resumes_to_the_same_bits(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    """Each rank's random numbers too. SIGINT to one rank stops both; so does the death of one."""
    dropout = tmp_path / "dropout.py"
    dropout.write_text(ODD.read_text().replace("DROPOUT = 0.0", "DROPOUT = 0.5"))
    changes = {"samples": 80, "algorithm": {"name": "odd", "options": {}}}
    train = {"batch": 2, "accumulate": 2, "rank_timeout": 30}
    straight = new_project(tmp_path / "straight", **changes, train={**train, "eval_every": 9})
    ranks = start(straight, "train.eval_prompts=0", plugin=dropout)
    assert ranks.finish() == [0, 0], ranks.output(0) + ranks.output(1)

    broken = new_project(tmp_path / "broken", **changes, train=train)
    ranks = start(broken, plugin=dropout)
    ranks.until(lambda: steps(broken) >= 5)
    ranks.send(1, signal.SIGINT)
    assert ranks.finish() == [130, 130], ranks.output(0)
    stopped = steps(broken)
    assert stopped < 20, "the run ended before it was stopped"
    assert f"interrupted: step {stopped} of 20" in ranks.output(0)
    assert tensors(broken.run, stopped)

    ranks = start(broken, plugin=dropout)
    ranks.until(lambda: steps(broken) >= stopped + 4)
    ranks.send(1, signal.SIGKILL)
    assert ranks.finish() == [ExitStatus.RANK_LOST, -signal.SIGKILL], ranks.output(0)
    assert f"resuming from step {stopped} of 20" in ranks.output(0)
    assert "error: another rank failed\n  it was killed" in ranks.output(0)
    assert steps(broken) < 20, "the run ended before it was killed"

    ranks = start(broken, plugin=dropout)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert broken.losses() == straight.losses()
    for file in ("draft", "optimizer"):
        ours, theirs = tensors(broken.run, 20, file), tensors(straight.run, 20, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = tensors(broken.run, 20, "optimizer")
    assert not torch.equal(states["rng.cpu"], states["rng.cpu.1"])


def test_another_number_of_ranks_resumes(tmp_path: Path, new_project: NewProject) -> None:
    """One rank, two of torchrun's own making, then one again."""
    constant = {"schedule": "constant", "checkpoint_every": 500, "batch": 2, "accumulate": 2}
    alone = new_project(tmp_path / "alone", train=constant)
    alone.cli("train")
    project = new_project(tmp_path / "changing", train=constant)
    project.cli("train", "train.max_steps=2")
    assert "resuming from step 2 of 4" in project.torchrun("train.max_steps=4")
    assert "resuming from step 4 of 6" in project.cli("train").output
    assert project.losses() == pytest.approx(alone.losses(), rel=1e-5)
    for name, tensor in tensors(alone.run, 6).items():
        torch.testing.assert_close(tensors(project.run, 6)[name], tensor, rtol=1e-4, atol=3e-5)


def test_a_draft_that_fails_leaves_the_others_alone_on_every_rank(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    """The sample at fault is named, whichever rank has it."""
    poison = tmp_path / "poison_one_draft.py"
    poison.write_text(
        "import dataclasses\n"
        "from draftcore import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss(draft, batch, context):\n"
        "    output = yield\n"
        "    marked_B = batch.loss_mask_BT.any(-1) & (batch.token_ids_BT.sum(-1) % 3 == 0)\n"
        "    if hasattr(draft.module, 'prefix_gru') and context.step == 2 and marked_B.any():\n"
        "        (top, bottom, weight), = output.terms\n"
        "        return dataclasses.replace(output, terms=[(top * float('inf'), bottom, weight)])\n"
        "    return output\n"
    )
    drafts = {label: DRAFTS[label] for label in ("blocks", "domino")}
    steps = {"accumulate": 2}
    one = new_project(tmp_path / "one", algorithm=None, drafts=drafts, train=steps)
    result = one.cli("train", plugin=poison, ok=False)
    two = new_project(tmp_path / "two", algorithm=None, drafts=drafts, train=steps)
    ranks = start(two, plugin=poison)
    assert ranks.finish() == [1, 1]
    assert "error" not in ranks.output(1)
    said = ranks.output(0).partition("error: ")[2]
    alone = result.output.partition("error: ")[2]
    assert "one of the rows [" in alone or "row " in alone
    assert "(sample " in said
    assert "domino: the gradient of step 2 is not finite" in said
    assert two.losses(two.run / "blocks") == pytest.approx(one.losses(one.run / "blocks"), rel=1e-5)
    assert len(two.losses(two.run / "domino")) == 1


def test_an_error_of_one_rank_in_a_read_ends_all_with_it(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    project = new_project(tmp_path / "project")
    project.cli("capture")
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "project" / "features", torn)
    for shard in torn.glob("shard-*"):
        shard.write_bytes(shard.read_bytes()[:-100])
    ranks = start(project, second=[f"store=file:{torn}"])
    assert ranks.finish() == [1, 1]
    assert "error: rank 1 failed" in ranks.output(0)
    assert "shard-" in ranks.output(0)


def test_a_loss_without_a_gradient_is_an_error_and_no_hang(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    project = new_project(tmp_path / "project")
    constant = tmp_path / "constant.py"
    constant.write_text(
        "import dataclasses, os\n"
        "from draftcore import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss():\n"
        "    output = yield\n"
        "    (top, bottom, weight), = output.terms\n"
        "    detached = dataclasses.replace(output, terms=[(top.detach(), bottom, weight)])\n"
        "    return detached if os.environ['RANK'] == '1' else output\n"
    )
    ranks = start(project, "train.shard=true", plugin=constant)
    assert ranks.finish() == [1, 1]
    assert "does not depend on the draft's weights" in ranks.output(1)
    assert "error: rank 1 failed" in ranks.output(0)


def test_a_loss_of_several_terms_is_refused_for_a_sharded_draft(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    file = tmp_path / "two_terms.py"
    file.write_text(
        "import dataclasses\n"
        "from draftcore import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss():\n"
        "    output = yield\n"
        "    return dataclasses.replace(output, terms=[*output.terms, *output.terms])\n"
    )
    ranks = start(new_project(tmp_path / "project"), "train.shard=true", plugin=file)
    assert 0 not in ranks.finish()
    said = ranks.output(0) + ranks.output(1)
    assert "has 2 terms" in said
    assert "leave out train.shard" in said


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    project = new_project(tmp_path / "project")
    project.cli("capture")
    ranks = start(project, largest_file=50_000)
    assert ranks.finish() == [1, 1]
    assert "error: cannot write checkpoint" in ranks.output(0)
    assert "earlier checkpoints are intact" in ranks.output(0)
    assert ranks.output(1) == ""
    assert not (project.run / "checkpoints" / "step-00000002").exists()


def test_a_frozen_rank_is_given_up(tmp_path: Path, new_project: NewProject, start: Start) -> None:
    project = new_project(tmp_path / "project", samples=120, train={"rank_timeout": 4})
    ranks = start(project)
    ranks.until(lambda: steps(project) >= 3)
    ranks.send(1, signal.SIGSTOP)
    ranks.processes[0].join(300)
    assert ranks.processes[0].exitcode == ExitStatus.RANK_LOST
    gone = r"error: another rank failed\n  it was .* frozen.*: .*Rank 1 failed to pass .* 4000 ms"
    assert re.search(gone, ranks.output(0))
    ranks.send(1, signal.SIGCONT)
    assert ExitStatus.RANK_LOST in ranks.finish()


@pytest.mark.parametrize(
    ("verb", "arguments", "says"),
    [
        ("train", ["train.accumulate=1"], ["a step has 1 batch,", "2 ranks share it"]),
        ("capture", [], ["torchrun started 2 ranks", "without torchrun"]),
        ("train", ["train.device=cuda:0"], ["cuda:0"]),
    ],
)
def test_what_ranks_cannot_do_is_said_once(
    project: Project, start: Start, verb: str, arguments: list[str], says: list[str]
) -> None:
    ranks = start(project, *arguments, verb=verb)
    assert ranks.finish() == [2, 2]
    for text in says:
        assert text in ranks.output(0) + ranks.output(1)


def test_ranks_that_do_not_come_together_say_so(project: Project, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.start(["train", str(project.yaml), "train.rank_timeout=1"], 2)
    assert ranks.finish() == [1]
    assert "2 ranks did not come together within 1 s" in ranks.output(0)
