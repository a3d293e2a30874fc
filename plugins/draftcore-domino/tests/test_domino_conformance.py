"""Domino passes its suites; a draft has the published sizes, and exports keep sglang's contract."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_domino.algorithm import Domino
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_fixtures import NO_DATA, ExportSuite, drop
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE, change_config, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from pydantic import ValidationError
from safetensors.torch import load_file

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError


class TestPlugin(PluginSuite):
    plugin = "draftcore_domino.plugin"


class TestDomino(AlgorithmSuite):
    plugin = "draftcore_domino.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
        "gru_hidden_dim": 32, "emb_dim": 24,
    }  # fmt: skip


HEAD = {
    "prefix_gru.weight_ih_l0": (36, 32),
    "prefix_gru.weight_hh_l0": (36, 12),
    "embed_proj.0.weight": (6, 44),
    "embed_proj.2.weight": (270, 6),
}


class TestExports(ExportSuite):
    plugin, architecture, servers = "draftcore_domino.plugin", "DFlashDraftModel", ("sglang",)
    kept: ClassVar = {"layers": (0, 2, 6)}
    against: ClassVar = {"gru_hidden_dim": 5}
    refused_configs: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "another projector": (
            {"dflash_config.projector_type": "causal_v5"}, "projector_type 'causal_v5'",
        ),
        "no projector": ({"dflash_config.projector_type": GONE}, "projector_type None"),
        "a long prefix": (
            {"dflash_config.pure_draft_prefix_len": 2}, r"pure_draft_prefix_len 2(.|\n)*must be 1",
        ),
        "no shift": ({"dflash_config.shift_label": GONE}, "lacks 'shift_label'"),
        "no sizes": ({"dflash_config.emb_dim": GONE, "emb_dim": GONE}, "lacks 'emb_dim'"),
        "two sizes": ({"emb_dim": 7}, r"two values of emb_dim: 7 (.|\n)*6"),
        "another rank": (
            {"dflash_config.emb_dim": 8, "emb_dim": 8}, r"embed_proj.0.weight is \[6, 44\], not \[8",
        ),
    }  # fmt: skip
    refused_tensors: ClassVar = {name: (drop(name), f"missing {name}") for name in HEAD}
    served: ClassVar = {
        "partial": ("partial", {}),
        "yarn, not shifted": ("deepseek-v3", {"shift_label": False}),
    }
    reader_shares: ClassVar = frozenset({"draftcore_nn.served", "draftcore_dflash.served"})


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


def test_dflash_does_not_take_a_domino_draft_for_its_own(
    exported: Path, target: TargetSpec
) -> None:
    with pytest.raises(UsageError, match="projector_type 'domino'"):
        DFlash(DFlashOptions()).import_draft(exported, target)
