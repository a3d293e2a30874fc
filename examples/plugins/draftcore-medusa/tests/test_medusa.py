"""What is this draft's own: its loss, its metrics, vLLM's files. The rest is in conformance."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_medusa import plugin
from draftcore_medusa.model import MedusaDraft
from draftcore_medusa.options import MedusaOptions
from draftcore_nn import losses
from draftcore_sdk.exports import GONE, change_config, change_tensors, config_of
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary, Draft, Sample, SampleId, StepContext
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

WIDTH, NO_DATA = 48, DataSummary("", 0, 0, 0, 0, {})
CONTEXT = StepContext(step=1, total_steps=1, seed=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    folder = tiny_target(tmp_path_factory.mktemp("target"), hidden_size=WIDTH)
    return TransformersTarget(str(folder), device="cpu")


def random_draft(target: TargetSpec, **options: Any) -> Draft:
    torch.manual_seed(2)
    draft = plugin.build_draft(target, NO_DATA, MedusaOptions(**options))
    for parameter in draft.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return draft


def samples(*lengths: int) -> list[Sample]:
    """Random samples in fp64, about three in four tokens to be learned."""
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(
            SampleId(str(length), 1),
            torch.randint(250, (length,), generator=generator),
            torch.rand(length, generator=generator) < 0.75,
            {"last_hidden": torch.randn(length, WIDTH, generator=generator).double()},
        )
        for length in lengths
    ]


# ------------------------------------------------------------ the heads and their loss


def test_a_fresh_head_predicts_what_the_target_predicts(target: TargetSpec) -> None:
    draft = plugin.build_draft(target, NO_DATA, MedusaOptions(num_layers=2))
    tokens_BT, model = torch.arange(18).view(2, 9), TransformersModel(target)
    hidden = model.features(tokens_BT, torch.tensor([9, 9]), FeatureRequest((), True, "float32"))
    hidden_RH = hidden["last_hidden"].flatten(0, 1).clone()
    assert isinstance(draft.module, MedusaDraft)
    for logits_RV in draft.module.logits(hidden_RH).unbind(1):
        torch.testing.assert_close(logits_RV, model.logits(hidden_RH))


def written_out(module: MedusaDraft, batch: list[Sample]) -> Tensor:
    """The sum over heads of decay^i times the head's mean cross entropy, a position at a time."""
    read, found = dict(module.named_parameters()), [list[Tensor]() for _ in module.blocks]
    for sample in batch:
        for t, state in enumerate(sample.features["last_hidden"]):
            for i in range(min(len(found), len(sample.token_ids_T) - 2 - t)):
                h = state
                for j in range(module.config.num_layers):
                    name = f"blocks.{i}.layers.{j}"
                    x = read[f"{name}.weight"] @ h + read[f"{name}.bias"]
                    h = h + x / (1 + torch.exp(-x))
                if sample.loss_mask_T[t + 2 + i]:
                    scores = module.target_head @ h
                    found[i].append(-scores.log_softmax(-1)[sample.token_ids_T[t + 2 + i]])
    means = [torch.stack(losses).mean() for losses in found]
    return torch.stack([module.decay**i * mean for i, mean in enumerate(means)]).sum()


@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 1, "num_layers": 3}, {"num_heads": 6, "decay": 0.5}], ids=str
)
def test_loss_and_gradients_are_the_published_formula_in_slices_of_rows_too(
    options: dict[str, Any], target: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, batch = random_draft(target, **options), samples(11, 1, 2, 14, 3)
    module = draft.module.double()
    assert isinstance(module, MedusaDraft)
    expected, weights = written_out(module, batch), list(module.parameters())
    gradients = torch.autograd.grad(expected, weights)
    for elements in (1 << 26, 5 * target.vocab_size):
        monkeypatch.setattr(losses, "LOGIT_ELEMENTS", elements)
        output = plugin.forward_loss(draft, plugin.collate(batch, MedusaOptions()), CONTEXT)
        loss = sum(weight * top / below for top, below, weight in output.terms)
        torch.testing.assert_close(loss, expected)  # fp64: 1e-7 relative
        for found, wanted in zip(torch.autograd.grad(loss, weights), gradients, strict=True):
            torch.testing.assert_close(found, wanted)


def test_metrics_count_hits_and_leading_hits(target: TargetSpec) -> None:
    """Tokens are set to what the heads say at two positions: three hits, and hit, miss, hit."""
    draft, (sample,) = random_draft(target, num_heads=3), samples(12)
    module = draft.module.double()
    assert isinstance(module, MedusaDraft)
    with torch.no_grad():
        best = module.logits(sample.features["last_hidden"]).argmax(-1)
    sample.loss_mask_T.fill_(False)
    sample.loss_mask_T[[2, 3, 4, 8, 9, 10]] = True
    sample.token_ids_T[2:5], sample.token_ids_T[8:11] = best[0], best[6]
    sample.token_ids_T[9] += 1
    rows = [[t for t in range(10 - i) if sample.loss_mask_T[t + 2 + i]] for i in range(3)]
    hits = [[t for t in rows[i] if best[t, i] == sample.token_ids_T[t + 2 + i]] for i in range(3)]
    assert ({0, 6} <= set(hits[0]), 0 in hits[1], 6 in hits[1]) == (True, True, False)
    assert {0, 6} <= set(hits[2])
    lengths = [1 + (t in hits[0]) * (1 + (t in hits[1]) * (1 + (t in hits[2]))) for t in rows[0]]
    output = plugin.forward_loss(draft, plugin.collate([sample], MedusaOptions()), CONTEXT)
    assert {name: (int(a), int(b)) for name, (a, b) in output.counts.items()} == {
        **{f"accuracy_{i}": (len(hits[i]), len(rows[i])) for i in range(3)},
        "acceptance_length": (sum(lengths), 6),
    }


# ------------------------------------------------------------ vLLM's files


@pytest.fixture
def draft(target: TargetSpec) -> Draft:
    return random_draft(target, num_heads=3, num_layers=2)


@pytest.fixture
def exported(draft: Draft, tmp_path: Path) -> Path:
    plugin.export_draft(draft, tmp_path / "export", "serving")
    return tmp_path / "export"


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


def test_a_server_computes_what_the_draft_computes(draft: Draft, exported: Path) -> None:
    hidden_BH = torch.randn(5, WIDTH)
    assert isinstance(draft.module, MedusaDraft)
    with torch.no_grad():
        logits_BKV = draft.module.logits(hidden_BH)
    torch.testing.assert_close(read_as_vllm(exported, hidden_BH), logits_BKV)


def test_vllms_other_spellings_are_read(draft: Draft, exported: Path, target: TargetSpec) -> None:
    change_tensors(
        exported, lambda t: [t.update({f"medusa_heads.{name}": t.pop(name)}) for name in [*t]]
    )
    change_config(exported, truncated_vocab_size=None)
    again = plugin.import_draft(exported, target, MedusaOptions(num_heads=3, decay=0.5))
    assert again.config == draft.config
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


def test_the_head_of_a_tied_target_in_half_precision_is_exported(tmp_path: Path) -> None:
    tied = tiny_target(tmp_path / "tied", tie_word_embeddings=True)
    change_tensors(tied, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    target = TransformersTarget(str(tied), device="cpu")
    plugin.export_draft(random_draft(target), tmp_path / "export", "serving")
    assert config_of(tmp_path / "export")["dtype"] == "bfloat16"
    again = plugin.import_draft(tmp_path / "export", target, MedusaOptions())
    assert torch.equal(again.module.get_buffer("target_head"), target.head())


REFUSED = {
    "model_type": ("llama", "model_type: 'llama'"),
    "medusa_fc_bias": (False, "medusa_fc_bias: False"),
    "original_lm_head": (GONE, "original_lm_head: False"),
    "logit_scale": (0.5, r"logit_scale: 0\.5"),
    "hidden_size": (64, "hidden_size 64, the target 48"),
    "vocab_size": (300, "truncated_vocab_size: 259"),
    "truncated_vocab_size": (100, "truncated_vocab_size: 100"),
    "num_heads": (4, r"missing blocks\.3\.layers\.0\.weight \[48, 48\]"),
    "num_hidden_layers": (1, r"unknown blocks\.0\.layers\.1\.weight \[48, 48\]"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_config_we_would_compute_differently_is_refused(
    field: str, exported: Path, target: TargetSpec
) -> None:
    value, message = REFUSED[field]
    change_config(exported, **{field: value})
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported, target, MedusaOptions())


def test_a_trained_or_another_targets_head_is_refused(exported: Path, target: TargetSpec) -> None:
    change_tensors(exported, lambda tensors: tensors["lm_head.weight"][7].add_(1e-3))
    with pytest.raises(UsageError, match=r"lm_head\.weight in .* is not the head of target"):
        plugin.import_draft(exported, target, MedusaOptions())
