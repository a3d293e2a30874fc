"""Two ranks of which one fails: all end, and say why. What they train: test_same_bits.py."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from draftcore.errors import ExitStatus
from tests.together.conftest import TWO_DRAFTS, NewProject, Project, Ranks, Start

# How one rank's loss, or every rank's, is wrong: an infinite one of one draft, one without a gradient,
# and one of several terms.
WRONG = """
import dataclasses, os
from draftcore import hookimpl

@hookimpl(wrapper=True)
def forward_loss(draft, batch, context):
    output = yield
    (top, bottom, weight), = output.terms
    marked_B = batch.loss_mask_BT.any(-1) & (batch.token_ids_BT.sum(-1) % 3 == 0)
    infinite = hasattr(draft.module, "prefix_gru") and context.step == 2 and marked_B.any()
    terms = {
        "infinite": [(top * float("inf") if infinite else top, bottom, weight)],
        "constant": [(top if os.environ.get("RANK") == "0" else top.detach(), bottom, weight)],
        "several": [*output.terms, *output.terms],
    }
    return dataclasses.replace(output, terms=terms["WAY"])
"""


def wrong(folder: Path, way: str) -> Path:
    file = folder / f"wrong_{way}.py"
    file.write_text(WRONG.replace("WAY", way))
    return file


def test_a_draft_that_fails_leaves_the_others_alone_on_every_rank(
    tmp_path: Path, new_project: NewProject, start: Start
) -> None:
    """The sample at fault is named, whichever rank has it."""
    changes = {"algorithm": None, "drafts": TWO_DRAFTS, "train": {"accumulate": 2}}
    one, two = (new_project(tmp_path / name, **changes) for name in ("one", "two"))
    alone = one.cli("train", plugin=wrong(tmp_path, "infinite"), ok=False).output
    assert "1 of 2 drafts failed" in alone
    ranks = start(two, plugin=wrong(tmp_path, "infinite"))
    assert ranks.finish() == [1, 1]
    assert "error" not in ranks.output(1)
    said = ranks.output(0).partition("error: ")[2]
    assert re.search(r"one of the rows \[|row ", alone.partition("error: ")[2])
    assert "(sample " in said
    assert "domino: the gradient of step 2 is not finite" in said
    assert two.losses("blocks") == pytest.approx(one.losses("blocks"), rel=1e-5)
    assert len(two.losses("domino")) == 1


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("constant", ["does not depend on the draft's weights", "error: rank 1 failed"]),
        ("several", ["has 2 terms", "leave out train.shard"]),
    ],
)
def test_a_loss_that_a_sharded_draft_cannot_be_trained_by_is_an_error_and_no_hang(
    project: Project, tmp_path: Path, start: Start, way: str, says: list[str]
) -> None:
    ranks = start(project, "train.shard=true", plugin=wrong(tmp_path, way))
    assert 0 not in ranks.finish()
    for text in says:
        assert text in ranks.output(0) + ranks.output(1)


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(trained: Project, start: Start) -> None:
    shutil.rmtree(trained.run)
    ranks = start(trained, largest_file=50_000)
    assert ranks.finish() == [1, 1]
    assert "error: cannot write checkpoint" in ranks.output(0)
    assert "earlier checkpoints are intact" in ranks.output(0)
    assert ranks.output(1) == ""
    assert not (trained.run / "checkpoints" / "step-00000002").exists()


def test_a_frozen_rank_is_given_up(tmp_path: Path, new_project: NewProject, start: Start) -> None:
    project = new_project(tmp_path / "project", samples=120, train={"rank_timeout": 4})
    ranks = start(project)
    ranks.until(lambda: len(project.losses()) >= 3)
    ranks.send(1, signal.SIGSTOP)
    ranks.processes[0].join(300)
    assert ranks.processes[0].exitcode == ExitStatus.RANK_LOST
    gone = (
        r"error: another rank failed\n  it was .* frozen.*: .*(failed to pass .*|waiting )4000 ?ms"
    )
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
