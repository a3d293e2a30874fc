"""The export as vLLM reads it, back again, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftcore_medusa import plugin
from draftcore_medusa.options import MedusaOptions
from draftcore_sdk.exports import change_config, change_tensors, config_of
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore.target import TransformersTarget

MakeDraft = Callable[..., Draft]


@pytest.fixture
def exported(make_draft: MakeDraft, tmp_path: Path) -> tuple[Draft, Path]:
    draft = make_draft(dtype=torch.float32, num_heads=3, num_layers=2)
    plugin.export_draft(draft, tmp_path / "export", "serving")
    return draft, tmp_path / "export"


def read_as_vllm(folder: Path, hidden_BH: Tensor) -> Tensor:
    """Logits [B, K, V] by vLLM's rules: its config class first, then its loader, then its forward."""
    data = config_of(folder)
    assert data["architectures"] == ["MedusaModel"]
    assert data["model_type"] == "medusa"
    # Its config class renames every key that holds `num` and `heads` or `layers`; the last one wins.
    heads = [value for key, value in data.items() if "num" in key and "heads" in key]
    layers = [v for k, v in data.items() if "num" in k and "heads" not in k and "layers" in k]
    vocab = data["truncated_vocab_size"] or data["vocab_size"]
    assert vocab == data["vocab_size"]  # or a token_map would have to be there
    wanted = {"lm_head.weight"} if data.get("original_lm_head") else set()
    kinds = ("weight", "bias") if data.get("medusa_fc_bias") else ("weight",)
    wanted |= {
        f"blocks.{i}.layers.{j}.{kind}"
        for i in range(heads[-1])
        for j in range(layers[-1])
        for kind in kinds
    }
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == wanted  # what has no parameter is dropped in silence
    assert tensors["lm_head.weight"].shape == (vocab, data["hidden_size"])
    logits = []
    for i in range(heads[-1]):
        x_BH = hidden_BH
        for j in range(layers[-1]):
            weight, bias = (tensors[f"blocks.{i}.layers.{j}.{kind}"] for kind in kinds)
            x_BH = x_BH + torch.nn.functional.silu(x_BH @ weight.T + bias)
        logits.append(x_BH @ tensors["lm_head.weight"].T * data.get("logit_scale", 1.0))
    return torch.stack(logits, 1)


def test_a_server_computes_what_the_draft_computes(exported: tuple[Draft, Path]) -> None:
    draft, folder = exported
    hidden_BH = torch.randn(5, 48)
    with torch.no_grad():
        torch.testing.assert_close(read_as_vllm(folder, hidden_BH), draft.module.logits(hidden_BH))


def test_an_export_reloads_exactly(exported: tuple[Draft, Path], target: TargetSpec) -> None:
    draft, folder = exported
    again = plugin.import_draft(folder, target, MedusaOptions(decay=0.5))
    assert again.config == draft.config
    assert again.module.decay == 0.5
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


def test_a_target_in_half_precision_with_a_tied_head_round_trips(tmp_path: Path) -> None:
    tied = tiny_target(tmp_path / "tied", tie_word_embeddings=True, dtype="bfloat16")
    target = TransformersTarget(str(tied), device="cpu")
    draft = plugin.build_draft(target, None, MedusaOptions())  # type: ignore[arg-type]
    plugin.export_draft(draft, tmp_path / "export", "serving")
    data = json.loads((tmp_path / "export" / "config.json").read_text())
    assert data["dtype"] == str(target.head().dtype).removeprefix("torch.")
    again = plugin.import_draft(tmp_path / "export", target, MedusaOptions())
    assert torch.equal(again.module.get_buffer("target_head"), target.head())


def test_vllms_other_spellings_are_read(exported: tuple[Draft, Path], target: TargetSpec) -> None:
    draft, folder = exported

    def prefix(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"medusa_heads.{name}"] = tensors.pop(name)

    change_tensors(folder, prefix)
    change_config(folder, truncated_vocab_size=None)
    again = plugin.import_draft(folder, target, MedusaOptions())
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


REFUSED_CONFIGS = {
    "model_type": ("llama", "model_type: 'llama'"),
    "medusa_fc_bias": (False, "medusa_fc_bias: False"),
    "original_lm_head": (False, "original_lm_head: False"),
    "logit_scale": (0.5, r"logit_scale: 0\.5"),
    "hidden_size": (64, "hidden_size 64, the run 48"),
    "vocab_size": (300, "vocabulary of 259 tokens"),
    "truncated_vocab_size": (100, "vocabulary of 100 tokens"),
    "num_heads": (4, r"missing blocks\.3\.layers\.0\.weight \[48, 48\]"),
    "num_hidden_layers": (1, r"unknown blocks\.0\.layers\.1\.weight \[48, 48\]"),
}


@pytest.mark.parametrize("field", REFUSED_CONFIGS)
def test_a_config_we_would_compute_differently_is_refused(
    field: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    value, message = REFUSED_CONFIGS[field]
    change_config(exported[1], **{field: value})
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, MedusaOptions())


def test_a_shape_that_the_run_sets_must_be_the_drafts(
    exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    assert plugin.import_draft(exported[1], target, MedusaOptions(num_heads=3))
    with pytest.raises(UsageError, match="num_heads 3, the run 5"):
        plugin.import_draft(exported[1], target, MedusaOptions(num_heads=5))


def test_a_trained_or_another_targets_head_is_refused(
    exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    change_tensors(exported[1], lambda tensors: tensors["lm_head.weight"][7].add_(1e-3))
    with pytest.raises(UsageError, match=r"lm_head\.weight in .* is not the head of target"):
        plugin.import_draft(exported[1], target, MedusaOptions())


def test_what_is_not_there_is_named(exported: tuple[Draft, Path], target: TargetSpec) -> None:
    folder = exported[1]
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        plugin.import_draft(folder, target, MedusaOptions())
    data = config_of(folder)
    del data["num_heads"]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="lacks 'num_heads'"):
        plugin.import_draft(folder, target, MedusaOptions())
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        plugin.import_draft(folder, target, MedusaOptions())


def test_an_unknown_layout_and_a_diverged_draft_leave_nothing(
    make_draft: MakeDraft, tmp_path: Path
) -> None:
    draft, folder = make_draft(), tmp_path / "export"
    with pytest.raises(UsageError, match=r"did you mean 'serving'\?"):
        plugin.export_draft(draft, folder, "servin")
    draft.module.get_parameter("blocks.1.layers.0.weight").data[3, 3] = float("nan")
    with pytest.raises(DraftcoreError, match=r"blocks\.1\.layers\.0\.weight is not finite"):
        plugin.export_draft(draft, folder, "serving")
    assert not folder.exists()
