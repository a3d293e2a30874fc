"""What plugin authors read: the page is executed and its outputs compared; so are the one-file examples."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from draftcore_eval.decode import EagerRows, EagerRunner
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from tests.forks import ENVIRONMENT
from tests.together.conftest import BLOCKS, NewProject, Project, Start

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
DFLASH = {"name": "dflash", "options": BLOCKS}
FOLDER = ROOT / "examples" / "plugins"
EARLY_STOP, WSD = FOLDER / "early_stop.py", FOLDER / "wsd.py"
# At this rate no weight moves, and so no loss falls.
STUCK = ("train.lr=1e-30", "train.eval_every=1", "train.eval_samples=2", "train.eval_prompts=0")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Author:
    """A folder with run.yaml, and an environment of its own that sees what is installed here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        seen = "\n".join(path for path in sys.path if path.endswith("site-packages"))
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "seen.pth").write_text(seen + "\n")

    def run(self, line: str) -> str:
        """Run a command as its author would; pip takes nothing from an index."""
        program, *arguments = shlex.split(line)
        start = [] if program == "python" else ["-m", program]
        if program == "pip":
            alone = ["--no-deps", "--no-build-isolation"] if "install" in arguments else []
            arguments += ["-q", "--disable-pip-version-check", *alone]
        command, env = [str(self.python), *start], {"PYTHONDONTWRITEBYTECODE": "1"}
        if program == "draftcore" and {"train", "eval", "export"} & {*arguments}:
            command, env = [sys.executable, *start], {ENVIRONMENT: str(self.folder / "venv")}
        done = subprocess.run(
            [*command, *arguments], cwd=self.folder, capture_output=True, text=True,
            env={**os.environ, **env},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def require_match(shown: str, printed: str) -> None:
    """Compare, where `...` in a line stands for anything, and alone for any lines."""
    pattern = ""
    for line in map(squeeze, shown.splitlines()):
        words = re.escape(line).replace(r"\.\.\.", ".*")
        pattern += r"(?:.*\n)*?" if line == "..." else words + r"\n"
    found = "".join(squeeze(line) + "\n" for line in printed.splitlines())
    assert re.fullmatch(pattern, found), f"shown:\n{shown}\nprinted:\n{printed}"


def squeeze(line: str) -> str:
    return re.sub(r"\s+", " ", line).strip()


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, new_project: NewProject) -> None:
    project = new_project(tmp_path, algorithm=DFLASH)
    project.yaml.write_text(yaml.safe_dump({**project.config, "run": "run", "store": "auto"}))
    author = Author(tmp_path)
    idea, watch, suite, excused = blocks("python")
    (tmp_path / "my_loss.py").write_text(idea)
    (tmp_path / "watch.py").write_text(watch)
    for block in blocks("console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = command.partition("\n")
            require_match(shown, author.run(line))
    (tmp_path / "test_suite.py").write_text(suite)
    (tmp_path / "test_excused.py").write_text(excused)
    author.run("python -m pytest -q -k order_in_a_batch test_suite.py test_excused.py")


def test_the_loss_of_the_first_page_changes_what_is_trained(
    tmp_path: Path, new_project: NewProject
) -> None:
    (idea, *_) = blocks("python")
    assert len(idea.splitlines()) <= 12
    (tmp_path / "my_loss.py").write_text(idea)
    losses = []
    for name, plugin in (("plain", None), ("decayed", tmp_path / "my_loss.py")):
        kept = {"store": f"file:{tmp_path / 'features'}"}
        project = new_project(tmp_path / name, algorithm=DFLASH, **kept)
        project.cli("train", "train.max_steps=2", plugin=plugin)
        losses.append(project.losses())
    assert all(losses[1][step] > losses[0][step] for step in losses[0])


class Scripted:
    """Target and drafter of the page's two rounds, which note what they are given and answer."""

    device, spec, request = torch.device("cpu"), SimpleNamespace(vocab_size=100), None

    def __init__(self) -> None:
        self.lines, self.num_drafts = list[str](), 3
        self.says = {13: 14, 14: 15, 15: 16, 16: 17, 99: 50}
        self.says |= {17: 18, 18: 19, 77: 51, 66: 52, 19: 20}
        self.drafts = Proposal(torch.tensor([[15, 16, 99]]))

    def note(self, which: str, **given: Tensor | None) -> None:
        told = [
            f"{name} {' '.join(map(str, x[0].tolist()))}"
            for name, x in given.items()
            if x is not None
        ]
        self.lines.append(f"{which:12}{'   '.join(told)}".replace("_", " "))

    def allocate(self, batch: int, max_len: int) -> list[list[Tensor]]:
        return []

    def said(self, tokens_BT: Tensor) -> Tensor:
        return torch.tensor([[self.says.get(token, 0) for token in tokens_BT[0].tolist()]])

    def forward(
        self, cache: Any, tokens_BT: Tensor, starts_B: Tensor, span: int, request: Any,
        seen_BTT: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        deep_BT = (
            torch.arange(tokens_BT.shape[1])[None] if seen_BTT is None else seen_BTT.sum(-1) - 1
        )
        if starts_B[0]:
            at_BT = starts_B + deep_BT
            self.note("target", reads=tokens_BT, at_positions=at_BT, says=self.said(tokens_BT))
        return {"last_hidden": tokens_BT}

    def logits(self, tokens: Tensor) -> Tensor:
        said = self.said(tokens.view(1, -1)).view(tokens.shape)
        return torch.nn.functional.one_hot(said, 100).float()

    def prefill(
        self, state: Any, tokens_BT: Tensor, lengths_B: Tensor, features: Any, next_B: Tensor
    ) -> None:
        given = {"tokens": tokens_BT, "features_of": features["last_hidden"], "next": next_B[None]}
        self.note("prefill", **given)

    def propose(self, *_: object) -> Proposal:
        self.note("propose", tokens=self.drafts.tokens_BK, parents=self.drafts.parents_BK)
        return self.drafts

    def accept(self, state: Any, tokens_BP: Tensor, features: Any, counts_B: Tensor) -> None:
        new = slice(int(counts_B))
        given = {"tokens": tokens_BP[:, new], "features_of": features["last_hidden"][:, new]}
        self.note("accept", **given, counts=counts_B[None])


def test_the_rounds_in_numbers_are_what_happens() -> None:
    both: Any = Scripted()
    rows = EagerRows(EagerRunner(both, both), [[11, 12, 13]], 20, 0.0, seed=0)
    rows.propose()
    rows.verify(20)
    both.num_drafts, both.depth = 4, 2
    parents_BK = torch.tensor([[-1, -1, 0, 0]])
    both.drafts = Proposal(torch.tensor([[18, 77, 66, 19]]), parents_BK=parents_BK)
    rows.propose()
    rows.verify(20)
    (shown,) = blocks("text")
    assert both.lines == [line for line in shown.splitlines() if "   " in line]


# ---------------------------------------------------------------- the examples of one file


def newest(project: Project) -> dict[str, Any]:
    folder = max((project.run / "checkpoints").glob("step-*"))
    found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return found


def test_training_ends_when_the_held_out_loss_no_longer_falls_and_says_why(
    project: Project,
) -> None:
    """With a checkpoint, from which the same command goes on; status 0."""
    said = project.cli("train", *STUCK, plugin=EARLY_STOP).output.strip().splitlines()
    assert "stopped: step 4 of 6" in said[-3]
    assert said[-1].startswith("stopped by the plugin early_stop: the held-out loss was ")
    assert (newest(project)["step"], newest(project)["stopped"]) == (4, said[-1].partition(": ")[2])
    assert len(project.evaluations()) == 4
    for held_out in project.evaluations():
        assert held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))
    for line in (line for line in project.lines() if "loss" in line):
        norms = [value for name, value in line.items() if name.startswith("grad_norm.")]
        assert len(norms) > 1
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert "complete: step 6 of 6" in project.cli("train", *STUCK, plugin=EARLY_STOP).output
    report = project.cli("eval", "--json", plugin=EARLY_STOP).stdout
    assert "perplexity" not in json.loads(report)


def test_a_run_of_several_processes_is_stopped_alike(project: Project) -> None:
    """The launcher asks for the last step's checkpoint, and takes that of a stop."""
    project.cli("train", *STUCK, "store=auto", "topology.producers=1", plugin=EARLY_STOP)
    assert (newest(project)["step"], bool(newest(project)["stopped"])) == (4, True)


def test_the_parts_of_a_sharded_draft_are_shown_whole(project: Project, start: Start) -> None:
    """Its gradients, to rank 0; and both ranks end when it is told to stop."""
    shared = ("train.shard=true", "train.epochs=2")
    ranks = start(project, *STUCK, *shared, plugin=EARLY_STOP)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert "stopped by the plugin early_stop" in ranks.output(0)
    assert newest(project)["step"] == 4
    steps = [line for line in project.lines() if "loss" in line]
    for line in steps:
        norms = [value for name, value in line.items() if name.startswith("grad_norm.")]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert len(steps) == 4


def test_a_run_that_learns_is_not_stopped_and_is_as_without_the_plugin(project: Project) -> None:
    often = ("train.eval_every=1", "train.eval_prompts=0", "train.epochs=2")
    assert "complete: step 12 of 12" in project.cli("train", *often, plugin=EARLY_STOP).output
    watched = project.losses()
    project.cli("train", *often, f"run={project.folder / 'alone'}")
    assert project.losses("../alone") == watched


def test_the_rate_rises_holds_and_falls(project: Project) -> None:
    project.cli("train", "train.epochs=3", "train.warmup_ratio=0.25", plugin=WSD)
    rates = [line["lr"] / 0.003 for line in project.lines()]
    rising = [step / 4.5 for step in range(1, 5)]
    falling = [3 / 3.6, 2 / 3.6, 1 / 3.6]
    assert rates == pytest.approx([*rising, *[1.0] * 11, *falling])
