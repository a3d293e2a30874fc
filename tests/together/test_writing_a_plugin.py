"""The page for plugin authors, executed: its files written, its commands run, outputs compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from tests.together.conftest import NewProject

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
DFLASH = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}


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
            arguments += ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [self.python, *start, *arguments], cwd=self.folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
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
    project = new_project(tmp_path, algorithm={"name": "dflash", "options": DFLASH})
    project.yaml.write_text(yaml.safe_dump({**project.config, "run": "run", "store": "auto"}))
    author = Author(tmp_path)
    idea, suite, excused = blocks("python")
    (tmp_path / "my_loss.py").write_text(idea)
    for block in blocks("console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = command.partition("\n")
            require_match(shown, author.run(line))
    for name, text in (("suite", suite), ("excused", excused)):
        (tmp_path / f"test_{name}.py").write_text(text)
        author.run(f"python -m pytest -q -k order_in_a_batch test_{name}.py")


def test_the_loss_of_the_first_page_changes_what_is_trained(
    tmp_path: Path, new_project: NewProject
) -> None:
    (idea, *_) = blocks("python")
    assert len(idea.splitlines()) <= 12
    (tmp_path / "my_loss.py").write_text(idea)
    losses = []
    for name, plugin in (("plain", None), ("decayed", tmp_path / "my_loss.py")):
        project = new_project(tmp_path / name, algorithm={"name": "dflash", "options": DFLASH})
        project.cli("train", "train.max_steps=2", plugin=plugin)
        losses.append(project.losses())
    assert all(losses[1][step] > losses[0][step] for step in losses[0])
