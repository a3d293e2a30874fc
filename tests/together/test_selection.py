"""A run imports the plugins that it selects, and what else is installed cannot disturb it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.together.conftest import Project

TRAIN = """
import sys
from draftcore.cli import main

main(["train", sys.argv[1], "train.max_steps=1"], standalone_mode=False)
print("modules", *sys.modules)
main(["list-plugins"])
"""


def test_training_imports_no_plugin_that_it_did_not_select(
    project: Project, tmp_path: Path
) -> None:
    """Beside all our own dists lies one that cannot be imported, which only the listing tries."""
    info = tmp_path / "site" / "draftcore_broken-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftcore-broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[draftcore]\nbroken = draftcore_broken\n")
    (info.parent / "draftcore_broken.py").write_text("raise AssertionError('imported')\n")
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(project.yaml)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, _, modules = done.stdout.partition("modules ")
    assert "complete: step 1 of 1" in trained
    assert "warning" not in done.stderr.lower()
    modules, _, listing = modules.partition("\n")
    packages = {name.partition(".")[0] for name in modules.split() if "draftcore_" in name}
    assert packages == {"draftcore_eagle3", "draftcore_nn"}
    assert "AssertionError: imported" in listing
