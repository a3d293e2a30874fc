"""What a draft is made of, what options refuse, and what importing costs."""

import subprocess
import sys

import pytest
import torch
from draftcore_domino import plugin
from draftcore_domino.options import DominoOptions
from pydantic import ValidationError

from draftcore.contracts.algorithm import DataSummary, Draft
from draftcore.contracts.target import TargetSpec


def build(target: TargetSpec) -> Draft:
    torch.manual_seed(0)
    nothing = DataSummary("", 0, 0, 0, 0, {})
    return plugin.build_draft(target, nothing, DominoOptions(num_layers=2))


def test_a_fresh_draft_has_the_published_sizes(target: TargetSpec) -> None:
    draft = build(target)
    shapes = {name: tuple(parameter.shape) for name, parameter in draft.module.named_parameters()}
    assert shapes["prefix_gru.weight_ih_l0"] == (3072, 32)
    assert shapes["prefix_gru.weight_hh_l0"] == (3072, 1024)
    assert shapes["embed_proj.0.weight"] == (256, 32 + 1024)
    assert shapes["embed_proj.2.weight"] == (270, 256)
    assert not any("bias" in name for name in shapes)
    for name in ("embed_proj.0.weight", "embed_proj.2.weight"):
        std = float(draft.module.get_parameter(name).detach().std())
        assert std == pytest.approx(0.02, rel=0.1), name
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (6e-4, 0.04, 1.0)


def test_the_head_is_trained_and_saved_and_the_targets_tensors_are_not(target: TargetSpec) -> None:
    draft = build(target)
    trained = {id(p) for group in draft.parameter_groups for p in group["params"]}
    assert trained == {id(p) for p in draft.module.parameters()}
    saved = set(draft.module.state_dict())
    assert {"prefix_gru.weight_hh_l0", "embed_proj.2.weight"} <= saved
    assert set(draft.frozen) == {"embed_tokens", "target_head"}
    assert not set(draft.frozen) & saved


def test_request_is_the_backbones(target: TargetSpec) -> None:
    request = plugin.feature_request(target, DominoOptions(num_layers=3))
    assert request.names == ("hidden.1", "hidden.3", "hidden.5")


def test_options_refuse_dflashs_own_objective_and_describe_the_rest() -> None:
    with pytest.raises(ValidationError, match="loss"):
        DominoOptions.model_validate({"loss": "dpace"})
    for name, field in DominoOptions.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


def test_listing_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from draftcore_domino import plugin; offer, = plugin.describe();"
        "assert (offer.kind, offer.name) == ('algorithm', 'domino');"
        "heavy = {'torch', 'pydantic', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
