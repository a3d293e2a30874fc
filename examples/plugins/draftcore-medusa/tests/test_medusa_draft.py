"""What a draft takes from its target, what options refuse, and what importing costs."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftcore_medusa import plugin
from draftcore_medusa.model import MedusaDraft
from draftcore_medusa.options import MedusaOptions
from pydantic import ValidationError

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.target import TransformersModel

MakeDraft = Callable[..., Draft]


def test_a_fresh_head_predicts_what_the_target_predicts(
    make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft, model = (
        make_draft(dtype=torch.float32, random=False, num_layers=2),
        TransformersModel(target),
    )
    tokens_BT = torch.randint(250, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = model.features(tokens_BT, torch.tensor([9, 9]), FeatureRequest((), True, "float32"))
    hidden_RH = hidden["last_hidden"].flatten(0, 1).clone()
    assert isinstance(draft.module, MedusaDraft)
    for logits_RV in draft.module.logits(hidden_RH).unbind(1):
        torch.testing.assert_close(logits_RV, model.logits(hidden_RH))


def test_only_the_blocks_are_trained_and_saved(make_draft: MakeDraft) -> None:
    draft = make_draft(num_heads=2, num_layers=2)
    names = {
        f"blocks.{i}.layers.{j}.{x}" for i in (0, 1) for j in (0, 1) for x in ("weight", "bias")
    }
    assert set(draft.module.state_dict()) == names
    trained = {id(p) for group in draft.parameter_groups for p in group["params"]}
    assert trained == {id(p) for p in draft.module.parameters()}
    assert set(draft.frozen) == dict(draft.module.named_buffers()).keys()
    assert all(draft.module.get_submodule(unit) for unit in draft.wrap_units)
    assert draft.config == {
        "hidden_size": 48, "vocab_size": 259, "num_heads": 2, "num_layers": 2,
    }  # fmt: skip


def test_the_last_hidden_state_is_all_it_asks_for(target: TargetSpec) -> None:
    request = plugin.feature_request(target, MedusaOptions())
    assert (request.names, request.dtype) == (("last_hidden",), "float32")


@pytest.mark.parametrize("options", [{"num_heads": 0}, {"decay": 0}, {"heads": 3}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MedusaOptions(**options)


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, draftcore_medusa.plugin; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    modules = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pydantic", "safetensors"} & set(modules)
