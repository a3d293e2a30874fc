"""What `draftcore[standard]` and an algorithm do; what a core alone says that it lacks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.thirdparty.conftest import STANDARD

if TYPE_CHECKING:
    from tests.thirdparty.conftest import NewEnvironment, NewRun

# A line of a .pth file runs at every start of the interpreter.
NOTE_IMPORTS = """
import pathlib, sys

class Note:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("draftcore"):
            with pathlib.Path(sys.prefix, "imported.txt").open("a") as file:
                print(name.partition(".")[0], file=file)

sys.meta_path.insert(0, Note())
"""


def test_they_do_the_main_job_and_ask_for_no_other_dist(
    new_environment: NewEnvironment, new_run: NewRun
) -> None:
    here = new_environment(*STANDARD, "draftcore-nn", "draftcore-eagle3")
    (here.packages / "note_imports.py").write_text(NOTE_IMPORTS)
    (here.packages / "note_imports.pth").write_text("import note_imports\n")
    run = new_run("eagle3", layers=[1, 2, 4], draft_vocab_size=240, ttt_length=2, num_drafts=3)
    assert "complete: step 2 of 2" in here.draftcore("train", run.yaml)
    report = json.loads(here.draftcore("eval", run.yaml, "--json"))
    assert report["lossless"] is True
    here.draftcore("export", run.yaml)
    again = json.loads(
        here.draftcore("eval", run.yaml, "--export", run.folder / "export", "--json")
    )
    assert again["acceptance_length"] == report["acceptance_length"]
    elsewhere = ("topology.producers=1", f"run={run.folder}-elsewhere")
    assert "complete: step 2 of 2" in here.draftcore("train", run.yaml, *elsewhere)
    imported = set((here.folder / "imported.txt").read_text().split())
    standard = {dist.replace("-", "_") for dist in STANDARD}
    assert imported == {*standard, "draftcore_nn", "draftcore_eagle3"}


def test_a_core_alone_names_what_a_run_needs_and_then_does_it(
    new_environment: NewEnvironment, new_run: NewRun
) -> None:
    here = new_environment("draftcore")
    run = new_run("eagle3", layers=[1, 2, 4], draft_vocab_size=240, ttt_length=2, num_drafts=3)
    for line, dists in (
        ("pip install 'draftcore[standard]'", STANDARD[1:]),
        ("pip install draftcore-eagle3", ("draftcore-nn", "draftcore-eagle3")),
    ):
        assert line in here.refusal("train", run.yaml)
        here.install(*dists)
    assert "complete: step 2 of 2" in here.draftcore("train", run.yaml)
    assert json.loads(here.draftcore("eval", run.yaml, "--json"))["lossless"] is True
    here.draftcore("export", run.yaml)
