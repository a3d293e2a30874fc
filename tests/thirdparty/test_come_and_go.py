"""An algorithm is installed and removed, and a run of another one notices nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from tests.thirdparty.conftest import STANDARD

if TYPE_CHECKING:
    from tests.thirdparty.conftest import NewEnvironment, NewRun, Run

BLOCKS = {"num_layers": 1, "layers": [1, 3], "block_size": 4, "num_anchors": 4}
HEAD = {"gru_hidden_dim": 8, "emb_dim": 4}


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs wrote the same losses, weights and optimizer states."""
    for file in ("draft.safetensors", "optimizer.safetensors"):
        a, b = (load_file(run.checkpoint(2) / file) for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
            return False
    return len(one.losses) == 2 and one.losses == other.losses


def test_domino_comes_and_goes_and_dflash_notices_nothing(
    new_environment: NewEnvironment, new_run: NewRun
) -> None:
    here = new_environment(*STANDARD, "draftcore-nn", "draftcore-dflash")
    listed = here.plugins()
    assert "dflash" in listed
    assert "domino" not in listed
    before, after, domino = (
        new_run("dflash", **BLOCKS), new_run("dflash", **BLOCKS), new_run("domino", **BLOCKS, **HEAD)
    )  # fmt: skip
    here.draftcore("train", before.yaml)

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
        assert "domino 0.1.0: pip install draftcore-domino==0.1.0" in here.refusal(
            verb, domino.yaml
        )
    assert "pip install draftcore-domino" in here.refusal("train", domino.yaml, "train.epochs=2")
    resumed = here.draftcore("train", after.yaml, "train.epochs=2")
    assert "resuming from step 2 of 4" in resumed
    assert "complete: step 4 of 4" in resumed
