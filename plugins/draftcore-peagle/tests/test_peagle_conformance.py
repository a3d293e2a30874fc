"""P-EAGLE passes its suites; a fresh draft starts from its target, and exports say what vLLM reads."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.options import Eagle3Options
from draftcore_nn.served import UnservableError
from draftcore_peagle.algorithm import PEagle
from draftcore_peagle.options import PEagleOptions
from draftcore_sdk.algorithm_fixtures import ExportSuite, MakeDraft, drop
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE, change_config, change_tensors, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file

from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

SEEN = DataSummary("", 1, 6, 6, 6, {5: 3, 40: 2, 7: 1})


class TestPlugin(PluginSuite):
    plugin = "draftcore_peagle.plugin"


class TestPEagle(AlgorithmSuite):
    plugin = "draftcore_peagle.plugin"
    # At a ratio of 1 even texts of three labels train all depths that they have.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "draft_vocab_size": 200, "num_depths": 4, "down_sample_ratio": 1.0,
    }  # fmt: skip


class TestExports(ExportSuite):
    plugin, architecture, servers = "draftcore_peagle.plugin", "LlamaForCausalLMEagle3", ("vllm",)
    kept: ClassVar = {"draft_vocab_size": 20, "layers": [0, 2, 6], "num_layers": 3}
    free: ClassVar = {"num_depths": 9, "layers": [6, 2, 0]}
    against: ClassVar = {"num_layers": 2, "mask_token_id": 6}
    refused_configs: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "no masks": ({"pard_token": GONE, "ptd_token_id": GONE}, "lacks 'pard_token'"),
        "EAGLE-3": ({"parallel_drafting": False}, "parallel_drafting: False"),
    }
    refused_tensors: ClassVar = {
        name: (drop(name), f"missing {name.removesuffix('.weight')}")
        for name in ("mask_hidden", "embed_tokens.weight", "layers.1.mlp.up_proj.weight")
    }
    served: ClassVar = {
        "yarn": ("deepseek-v3", {"num_layers": 1}),
        "fc_norm": ("partial", {"num_layers": 3, "fc_norm": True, "train_head": False}),
    }
    reader_shares: ClassVar = frozenset({"draftcore_nn.served", "draftcore_eagle3.served"})


def test_a_fresh_draft_has_the_targets_embedding_to_train_and_its_head_if_wanted(
    target: TargetSpec,
) -> None:
    for trained in (True, False):
        options = PEagleOptions(draft_vocab_size=6, train_head=trained, mask_token_id=5)
        draft = PEagle(options).build_draft(target, SEEN)
        module: Any = draft.module
        assert torch.equal(module.lm_head.weight, target.head()[[0, 1, 2, 5, 7, 40]])
        assert torch.equal(module.embed_tokens, target.embedding())
        assert torch.equal(module.head, target.head())
        still = {name for name, p in module.named_parameters() if not p.requires_grad}
        assert (
            still
            == draft.frozen - {"target_head"}
            == {"lm_head.weight"} - {"lm_head.weight" * trained}
        )
        assert draft.wrap_units == ("midlayer", "layers.1", "layers.2", "layers.3")
        assert draft.about.startswith("4 layers of width 32")


def test_an_export_says_what_vllm_reads_and_published_spellings_are_read(
    draft: Draft, exported: Path, target: TargetSpec, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = caplog.get_records("setup")
    assert said.getMessage().startswith("vLLM alone serves this draft; sglang does not")
    data, tensors = config_of(exported), load_file(exported / "model.safetensors")
    expected = {
        "parallel_drafting": True, "pard_token": 5, "ptd_token_id": 5, "num_hidden_layers": 2,
        "norm_before_residual": False, "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }  # fmt: skip
    assert {name: data[name] for name in expected} == expected
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert torch.equal(tensors["embed_tokens.weight"], draft.module.get_parameter("embed_tokens"))
    names = [*tensors]
    change_tensors(exported, lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in names])
    change_config(exported, architectures=["PEagleDraftModel"], pard_token=GONE)
    again = PEagle(PEagleOptions()).import_draft(exported, target)
    require_same_bits(again.module.state_dict(), draft.module.state_dict())


def test_what_is_not_served_or_not_the_same_draft_is_refused_by_name(
    make_draft: MakeDraft, exported: Path, target: TargetSpec
) -> None:
    plain = PEagle(PEagleOptions())
    with pytest.raises(UsageError, match=r"'sglang' are known\n.*can be read as: vllm"):
        plain.read_export(exported, "sglang")
    with pytest.raises(UsageError, match="parallel_drafting: True"):
        Eagle3(Eagle3Options()).import_draft(exported, target)
    with pytest.raises(UsageError, match=r"head in .* was trained(.|\n)*train_head to true"):
        PEagle(PEagleOptions(train_head=False)).import_draft(exported, target)
    with pytest.raises(UsageError, match=r"num_drafts 9(.|\n)*at most 8"):
        PEagle(PEagleOptions(num_drafts=9)).drafter(make_draft(num_depths=8), target.load_model())
    change_config(exported, parallel_drafting=GONE)
    with pytest.raises(UnservableError, match="does not say parallel_drafting: true"):
        plain.read_export(exported, "vllm")
