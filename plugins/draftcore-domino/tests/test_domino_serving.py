"""Exports keep sglang's contract and reload exactly; damaged drafts are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash import plugin as dflash
from draftcore_dflash.options import DFlashOptions
from draftcore_domino import plugin
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples
from draftcore_sdk.exports import GONE, change_config, change_tensors, config_of
from safetensors.torch import load_file

from draftcore.contracts.algorithm import DataSummary, Draft, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

CONTEXT = StepContext(3, 20, 0)
HEAD = {
    "prefix_gru.weight_ih_l0": (36, 32),
    "prefix_gru.weight_hh_l0": (36, 12),
    "embed_proj.0.weight": (6, 44),
    "embed_proj.2.weight": (270, 6),
}


@pytest.fixture
def exported(make_draft: MakeDraft, folder: Path) -> tuple[Draft, Path]:
    draft = make_draft(dtype=torch.float32)
    plugin.export_draft(draft, folder, "serving")
    return draft, folder


@pytest.mark.parametrize("shift", [True, False])
def test_an_export_reloads_bit_for_bit(
    shift: bool,
    make_draft: MakeDraft,
    folder: Path,
    target: TargetSpec,
    make_samples: MakeSamples,
) -> None:
    draft = make_draft(dtype=torch.float32, shift_label=shift)
    plugin.export_draft(draft, folder, "serving")
    again = plugin.import_draft(folder, target, DominoOptions(num_anchors=5))
    assert isinstance(again.module, DominoDraft)
    assert again.module.domino.shift_label is shift
    batch = plugin.collate(make_samples(9, 5), DominoOptions())
    one, other = (plugin.forward_loss(d, batch, CONTEXT).numerator for d in (draft, again))
    assert torch.equal(one, other)


def test_an_export_keeps_the_servers_contract(exported: tuple[Draft, Path]) -> None:
    data = config_of(exported[1])
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
    tensors = load_file(exported[1] / "model.safetensors")
    assert {name: tuple(tensors[name].shape) for name in HEAD} == HEAD
    others = {name for name in tensors if name not in HEAD and not name.startswith("layers.")}
    assert others == {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_the_research_spelling_is_read(exported: tuple[Draft, Path], target: TargetSpec) -> None:
    draft, folder = exported
    change_config(folder, architectures=["DominoDraftModel"])
    change_config(folder, "dflash_config", emb_dim=GONE)
    again = plugin.import_draft(folder, target, DominoOptions())
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


# Fields of dflash_config, fields of the top level, and what the refusal says.
Fields = dict[str, Any]
REFUSED: dict[str, tuple[Fields, Fields, str]] = {
    "another projector": ({"projector_type": "causal_v5"}, {}, "projector_type 'causal_v5'"),
    "no projector": ({"projector_type": GONE}, {}, "projector_type None"),
    "a long prefix": ({"pure_draft_prefix_len": 2}, {}, "pure_draft_prefix_len 2(.|\\n)*must be 1"),
    "no shift": ({"shift_label": GONE}, {}, "lacks shift_label"),
    "no sizes": ({"emb_dim": GONE}, {"emb_dim": GONE}, "lacks emb_dim"),
    "two sizes": ({}, {"emb_dim": 7}, "two values of emb_dim: 7 (.|\\n)*6"),
    "another vocabulary": ({}, {"vocab_size": 269}, "vocab_size 269, the target 270"),
    "another rank": ({"emb_dim": 8}, {"emb_dim": 8}, r"embed_proj.0.weight is \[6, 44\], not \[8"),
    "an architecture": ({}, {"architectures": ["X"]}, r"DFlashDraftModel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_the_contract_is_refused(
    case: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    nested, top, message = REFUSED[case]
    change_config(exported[1], "dflash_config", **nested)
    change_config(exported[1], **top)
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, DominoOptions())


@pytest.mark.parametrize("name", HEAD)
def test_a_missing_part_of_the_head_is_named(
    name: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    change_tensors(exported[1], lambda tensors: tensors.pop(name))
    with pytest.raises(UsageError, match=f"missing {name}"):
        plugin.import_draft(exported[1], target, DominoOptions())


def test_dflash_does_not_take_a_domino_draft_for_its_own(
    exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    with pytest.raises(UsageError, match="projector_type 'domino'"):
        dflash.import_draft(exported[1], target, DFlashOptions())


def test_a_warm_start_takes_over_weights_and_shape(
    exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    options = DominoOptions(warm_start=str(exported[1]))
    assert plugin.feature_request(target, options).layers == (1, 3, 4)
    again = plugin.build_draft(target, DataSummary("", 0, 0, 0, 0, {}), options)
    for name, tensor in exported[0].module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    with pytest.raises(UsageError, match="option gru_hidden_dim is 5"):
        plugin.feature_request(target, options.model_copy(update={"gru_hidden_dim": 5}))
