"""A core becomes what a run needs, line by line; algorithms come and go, and nobody notices."""

import json

import torch
from safetensors.torch import load_file

from tests.thirdparty.conftest import STANDARD, NewEnvironment, NewRun, Run

BLOCKS = {"num_layers": 1, "layers": [1, 3], "block_size": 4, "num_anchors": 4}
HEAD = {"gru_hidden_dim": 8, "emb_dim": 4}
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


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs wrote the same losses, weights and optimizer states."""
    for file in ("draft.safetensors", "optimizer.safetensors"):
        a, b = (load_file(run.checkpoint(2) / file) for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
            return False
    return len(one.losses) == 2 and one.losses == other.losses


def test_the_core_names_what_a_run_needs_and_another_algorithm_comes_and_goes_unnoticed(
    new_environment: NewEnvironment, new_run: NewRun
) -> None:
    here = new_environment("draftcore")
    before, after = new_run("dflash", **BLOCKS), new_run("dflash", **BLOCKS)
    for line, dists in (
        ("pip install 'draftcore[standard]'", STANDARD[1:]),
        ("pip install draftcore-dflash", ("draftcore-nn", "draftcore-dflash")),
    ):
        assert line in here.refusal("train", before.yaml)
        here.install(*dists)

    # The main job, which asks for no other dist.
    (here.packages / "note_imports.py").write_text(NOTE_IMPORTS)
    (here.packages / "note_imports.pth").write_text("import note_imports\n")
    assert "complete: step 2 of 2" in here.draftcore("train", before.yaml)
    report = json.loads(here.draftcore("eval", before.yaml, "--json"))
    assert report["lossless"] is True
    here.draftcore("export", before.yaml)
    export = before.folder / "export"
    again = json.loads(here.draftcore("eval", before.yaml, "--export", export, "--json"))
    assert again["acceptance_length"] == report["acceptance_length"]
    elsewhere = ("topology.producers=1", f"run={before.folder}-elsewhere")
    assert "complete: step 2 of 2" in here.draftcore("train", before.yaml, *elsewhere)
    imported = set((here.folder / "imported.txt").read_text().split())
    standard = {dist.replace("-", "_") for dist in STANDARD}
    assert imported == {*standard, "draftcore_nn", "draftcore_dflash"}

    listed, domino = here.plugins(), new_run("domino", **BLOCKS, **HEAD)
    assert "domino" not in listed
    here.install("draftcore-domino")
    grown = here.plugins()
    assert grown["domino"]["state"] == "ready"
    assert {name: data for name, data in grown.items() if name != "domino"} == listed
    assert "complete: step 2 of 2" in here.draftcore("train", domino.yaml)
    here.draftcore("train", after.yaml)
    assert same_bits(before, after)
    assert not same_bits(before, domino)

    here.pip("uninstall", "-y", "draftcore-domino")
    assert here.plugins() == listed
    for verb in ("eval", "export"):
        said = here.refusal(verb, domino.yaml)
        assert "domino 0.1.0: pip install draftcore-domino==0.1.0" in said
    assert "pip install draftcore-domino" in here.refusal("train", domino.yaml, "train.epochs=2")
    resumed = here.draftcore("train", after.yaml, "train.epochs=2")
    assert "resuming from step 2 of 4" in resumed
    assert "complete: step 4 of 4" in resumed
