"""A draft's sizes; exports keep sglang's contract; damaged drafts are refused by name."""

from pathlib import Path
from typing import Any, ClassVar

import draftcore_domino
import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_domino.algorithm import Domino
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_checks import WarmStarts
from draftcore_sdk.algorithm_fixtures import NO_DATA, MakeDraft
from draftcore_sdk.algorithm_training import require_same_bits
from draftcore_sdk.exports import (
    GONE,
    ROPES,
    change_config,
    change_tensors,
    config_of,
    imports_of_ours,
    largest_gap,
)
from pydantic import ValidationError
from safetensors.torch import load_file

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

HEAD = {
    "prefix_gru.weight_ih_l0": (36, 32),
    "prefix_gru.weight_hh_l0": (36, 12),
    "embed_proj.0.weight": (6, 44),
    "embed_proj.2.weight": (270, 6),
}


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32)


@pytest.fixture
def exported(draft: Draft, folder: Path) -> Path:
    Domino(DominoOptions()).export_draft(draft, folder, "serving")
    return folder


def test_a_fresh_draft_has_the_published_sizes(target: TargetSpec) -> None:
    draft = Domino(DominoOptions(num_layers=2)).build_draft(target, NO_DATA)
    parameters = dict(draft.module.named_parameters())
    assert parameters["prefix_gru.weight_ih_l0"].shape == (3072, 32)
    assert parameters["prefix_gru.weight_hh_l0"].shape == (3072, 1024)
    assert parameters["embed_proj.0.weight"].shape == (256, 32 + 1024)
    assert parameters["embed_proj.2.weight"].shape == (270, 256)
    assert not any("bias" in name for name in parameters)
    for name in ("embed_proj.0.weight", "embed_proj.2.weight"):
        assert float(parameters[name].detach().std()) == pytest.approx(0.02, rel=0.1), name
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (6e-4, 0.04, 1.0)


def test_options_of_dflashs_own_objective_are_refused() -> None:
    with pytest.raises(ValidationError, match="loss"):
        DominoOptions.model_validate({"loss": "dpace"})


# ------------------------------------------------------------ exports


def test_an_export_keeps_the_servers_contract(exported: Path) -> None:
    data = config_of(exported)
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["emb_dim"] == 6
    assert data["vocab_size"] == 270
    expected = {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 12,
        "emb_dim": 6,
        "target_layer_ids": [1, 3, 4],
        "mask_token_id": 259,
        "block_size": 4,
    }
    assert data["dflash_config"] == expected
    tensors = load_file(exported / "model.safetensors")
    assert {name: tuple(tensors[name].shape) for name in HEAD} == HEAD
    others = {name for name in tensors if name not in HEAD and not name.startswith("layers.")}
    assert others == {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_the_research_spelling_is_read(draft: Draft, exported: Path, target: TargetSpec) -> None:
    change_config(exported, architectures=["DominoDraftModel"])
    change_config(exported, "dflash_config", emb_dim=GONE)
    again = Domino(DominoOptions()).import_draft(exported, target)
    require_same_bits(again.module.state_dict(), draft.module.state_dict())


# Fields of dflash_config, fields of the top level, and what the refusal says.
Fields = dict[str, Any]
REFUSED: dict[str, tuple[Fields, Fields, str]] = {
    "another projector": ({"projector_type": "causal_v5"}, {}, "projector_type 'causal_v5'"),
    "no projector": ({"projector_type": GONE}, {}, "projector_type None"),
    "a long prefix": ({"pure_draft_prefix_len": 2}, {}, "pure_draft_prefix_len 2(.|\\n)*must be 1"),
    "no shift": ({"shift_label": GONE}, {}, "lacks 'shift_label'"),
    "no sizes": ({"emb_dim": GONE}, {"emb_dim": GONE}, "lacks 'emb_dim'"),
    "two sizes": ({}, {"emb_dim": 7}, "two values of emb_dim: 7 (.|\\n)*6"),
    "another vocabulary": ({}, {"vocab_size": 269}, "vocab_size 269, the target 270"),
    "another rank": ({"emb_dim": 8}, {"emb_dim": 8}, r"embed_proj.0.weight is \[6, 44\], not \[8"),
    "an architecture": ({}, {"architectures": ["X"]}, r"DFlashDraftModel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_the_contract_is_refused(case: str, exported: Path, target: TargetSpec) -> None:
    nested, top, message = REFUSED[case]
    change_config(exported, "dflash_config", **nested)
    change_config(exported, **top)
    with pytest.raises(UsageError, match=message):
        Domino(DominoOptions()).import_draft(exported, target)


@pytest.mark.parametrize("name", HEAD)
def test_a_missing_part_of_the_head_is_named(name: str, exported: Path, target: TargetSpec) -> None:
    change_tensors(exported, lambda tensors: tensors.pop(name))
    with pytest.raises(UsageError, match=f"missing {name}"):
        Domino(DominoOptions()).import_draft(exported, target)


def test_dflash_does_not_take_a_domino_draft_for_its_own(
    exported: Path, target: TargetSpec
) -> None:
    with pytest.raises(UsageError, match="projector_type 'domino'"):
        DFlash(DFlashOptions()).import_draft(exported, target)


class TestWarmStarts(WarmStarts):
    kept: ClassVar = {"layers": (0, 2, 6)}
    against: ClassVar = {"gru_hidden_dim": 5}


# ------------------------------------------------------------ as sglang reads it


def test_the_servers_reader_shares_code_with_the_backbones_alone() -> None:
    package = Path(draftcore_domino.__file__).parent
    shared = {"draftcore_nn.served", "draftcore_dflash.served"}
    assert imports_of_ours(package / "served.py") == shared


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, tmp_path: Path) -> None:
    options = {"num_layers": 2, "block_size": 4, "gru_hidden_dim": 12, "emb_dim": 6}
    assert largest_gap("draftcore_domino.plugin", options, rope, "sglang", tmp_path) < 1e-3
