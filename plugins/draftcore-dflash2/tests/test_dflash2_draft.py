"""DFlash2 passes its suites; a fresh draft is DFlash's; exports keep the servers' contract."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.options import DFlashOptions
from draftcore_dflash2.algorithm import DFlash2
from draftcore_dflash2.options import DFlash2Options
from draftcore_nn.served import UnservableError
from draftcore_sdk.algorithm_fixtures import NO_DATA, ExportSuite, MakeDraft, MakeSamples, drop
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.comparisons import require_trained_drafts
from draftcore_sdk.exports import GONE, change_config, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

OPTIONS = DFlash2Options()


class TestPlugin(PluginSuite):
    plugin = "draftcore_dflash2.plugin"


class TestDFlash2(AlgorithmSuite):
    plugin = "draftcore_dflash2.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
        "selector_rank": 24, "selector_top_k": 64,
    }  # fmt: skip


SELECTOR = {
    "candidate_selector.predecessor_codebook": (270, 6),
    "candidate_selector.successor_codebook": (270, 6),
    "candidate_selector.hidden_projection.weight": (6, 32),
}
CONVOLUTIONS = {
    f"layers.{layer}.{conv}.{name}": shape
    for layer in range(2)
    for conv in ("attention_conv", "mlp_conv")
    for name, shape in (("base_kernel", (2, 2, 32)), ("kernel_projection.weight", (16, 32)))
}


class TestExports(ExportSuite):
    plugin, architecture = "draftcore_dflash2.plugin", "DFlash2DraftModel"
    kept: ClassVar = {"layers": (0, 2, 6), "selector_top_k": 5}
    free: ClassVar = {"labels": "teacher"}
    against: ClassVar = {"selector_rank": 5, "conv_kernel_size": 3}
    refused_configs: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "no rank": ({"dflash_config.selector_rank": GONE}, "lacks 'selector_rank'"),
        "another rank": (
            {"dflash_config.selector_rank": 8}, r"hidden_projection.weight is \[6, 32\], not \[8",
        ),
        "odd groups": ({"dflash_config.conv_group_size": 12}, "12 does not divide(.|\n)*a divisor"),
        "a long kernel": ({"dflash_config.conv_kernel_size": 5}, "there are 4 rows of a block"),
        "a multiplier": ({"dflash_config.output_multiplier": 0.2}, "output_multiplier: 0.2"),
        "a cap": ({"final_logit_softcapping": 20.0}, "final_logit_softcapping: 20.0"),
    }  # fmt: skip
    refused_tensors: ClassVar = {n: (drop(n), f"missing {n}") for n in [*SELECTOR, *CONVOLUTIONS]}
    served: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {
        "partial": ("partial", {"conv_kernel_size": 3}),
        "sliding": ("yarn", {"sliding_window": 6, "is_causal": False, "conv_group_size": 4}),
    }
    reader_shares: ClassVar = frozenset({"draftcore_nn.served", "draftcore_dflash.served"})


def test_a_fresh_draft_computes_what_dflashs_does_bit_for_bit(
    target: TargetSpec, make_samples: MakeSamples
) -> None:
    options: dict[str, Any] = {"num_layers": 2, "layers": (1, 3, 4), "block_size": 4}
    theirs = DFlash(DFlashOptions(**options)).build_draft(target, NO_DATA).module
    ours = DFlash2(DFlash2Options(**options)).build_draft(target, NO_DATA).module
    missing, _ = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert {*missing} >= {*SELECTOR}
    batch = DFlash2(OPTIONS).collate([sample.to("cpu") for sample in make_samples(9, 6)])
    blocks = Blocks.of(torch.tensor([[3, 5], [2, 0]]), torch.tensor([[True, True], [True, False]]))
    hidden: Any = [module.block_hidden(batch, blocks) for module in (ours, theirs)]  # type: ignore[operator]
    assert torch.equal(*hidden)


def test_proposals_equal_one_teacher_forced_pass_over_ragged_rounds(
    make_draft: MakeDraft, target: TargetSpec
) -> None:
    """Among all tokens of the vocabulary, and among few, to which the others' are -inf."""
    for count in (270, 7):
        draft = make_draft(conv_kernel_size=3, selector_top_k=count)
        module: Any = draft.module

        def trained(sample: Sample, known: int, module: Any = module, count: int = count) -> Tensor:
            blocks = Blocks.of(torch.tensor([[known - 1]]), torch.tensor([[True]]))
            hidden_KH = module.block_hidden(DFlash2(OPTIONS).collate([sample]), blocks)[0, 1:]
            unary_KV = hidden_KH @ module.head.T
            selector, previous_K = module.candidate_selector, sample.token_ids_T[known - 1 :][:3]
            query_KE = selector.predecessor_codebook[previous_K] * selector.hidden_projection(
                hidden_KH
            )
            worst_K1 = unary_KV.topk(count).values[:, -1:]
            scores_KV = unary_KV + query_KE @ selector.successor_codebook.T
            return scores_KV.masked_fill(unary_KV < worst_K1, -torch.inf)  # type: ignore[no-any-return]

        drafter = DFlash2(DFlash2Options(block_size=4)).drafter(draft, target.load_model())
        require_trained_drafts(drafter, 250, 0.7, trained)


# ------------------------------------------------------------ exports


def test_an_export_keeps_the_servers_contract(exported: Path) -> None:
    data = config_of(exported)
    assert data["architectures"] == ["DFlash2DraftModel"]
    assert (data["model_type"], data["num_target_layers"]) == ("qwen3", 8)
    assert data["dflash_config"] == {
        "target_layer_ids": [1, 3, 4], "mask_token_id": 259, "block_size": 4,
        "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7,
    }  # fmt: skip
    tensors = load_file(exported / "model.safetensors")
    added = {**SELECTOR, **CONVOLUTIONS}
    assert {name: tuple(tensors[name].shape) for name in added} == added
    assert {n for n in tensors if not n.startswith("layers.")} == {
        "fc.weight", "hidden_norm.weight", "norm.weight", *SELECTOR,
    }  # fmt: skip


def test_a_published_draft_is_read_with_a_prefix_and_not_by_dflash(
    draft: Draft, exported: Path, target: TargetSpec
) -> None:
    with pytest.raises(UsageError, match=r"\['DFlash2DraftModel'\](.|\n)*'DFlashDraftModel'"):
        DFlash(DFlashOptions()).import_draft(exported, target)
    change_config(exported, "dflash_config", selector_top_k=5)
    again = DFlash2(OPTIONS).import_draft(exported, target)
    require_same_bits(again.module.state_dict(), draft.module.state_dict())
    assert again.config["selector_top_k"] == 5
    change_config(exported, "dflash_config", conv_group_size=12)
    with pytest.raises(UnservableError, match="conv_group_size is 12, of a draft of width 32"):
        DFlash2(OPTIONS).read_export(exported, "sglang")
