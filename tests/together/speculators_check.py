"""An EAGLE-3 export, converted and loaded by speculators 0.9.0, computes what our draft computes.

Run by `nox -s speculators`; the name keeps it from being collected with the other tests, because
speculators is not installed with them. Everything on the other side is speculators' own: the
converter for `midlayer.` folders, the model class, the alignment of tokens with features, the
vocabulary mapping and the default layers.

Tolerance: both sides compute in fp32, in different orders (we split q/k/v into halves and use a
fused softmax). That is rounding of some 1e-7 of the largest logit per operation, measured at most
2e-6 in all after three steps. The limit is 1e-5; `speculators_verify_check` shows that a damaged export
is off by 1e-3 at least. In bf16, where an operation rounds by 4e-3, three steps are measured at 1.1e-2.

Three things its converter does not take from an export, found on the way:
- captured layers: they are passed as an argument, in its convention, which is that of our
  top-level field (an output of layer i is called i+1);
- the weights of `fc_norm`: it keeps the flag and drops the tensors, so `convert` puts them back;
- `partial_rotary_factor`: such a draft is loaded with full rotation, and its logits are wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.exports import ROPES, change, config_of
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary, Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec

STEPS, LENGTHS = 3, (23, 14)
LIMIT, HALF_LIMIT = 1e-5, 0.03
# 87 tokens were seen, in an order of frequency that is not that of their ids; 80 are kept.
COUNTS = {(5 * index) % 259: 300 - index for index in range(87)}
TOKENS = 80


class Exported(NamedTuple):
    draft: Draft
    target: TargetSpec
    folder: Path

    @property
    def module(self) -> Eagle3Draft:
        assert isinstance(self.draft.module, Eagle3Draft)
        return self.draft.module

    @property
    def config(self) -> dict[str, Any]:
        return config_of(self.folder)


def export(
    folder: Path, shape: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any
) -> Exported:
    """Export a draft with random weights, for a target of eight layers, through the hook."""
    path = tiny_target(folder / "target", num_hidden_layers=8, **shape)

    def cast(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    change(path, cast)
    target = TransformersTarget(str(path))
    summary = DataSummary("", 1, 1, 1, 1, COUNTS)
    draft = Eagle3(Eagle3Options(ttt_length=STEPS, **options)).build_draft(target, summary)
    torch.manual_seed(4)
    for parameter in draft.module.parameters():  # norms are vectors about 1, and not equal
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    Eagle3(Eagle3Options()).export_draft(draft, folder / "export", "serving")
    return Exported(draft, target, folder / "export")


def convert(exported: Exported, layers: list[int] | None = None) -> Any:
    """Convert with speculators and load the result with speculators."""
    folder = exported.folder.with_name("converted")
    convert_model(
        model=str(exported.folder),
        verifier=exported.target.path,
        algorithm="eagle3",
        output_path=str(folder),
        eagle_aux_hidden_state_layer_ids=layers,
    )
    file = folder / "model.safetensors"
    tensors, original = load_file(file), load_file(exported.folder / "model.safetensors")
    dropped = {n for n in original if n.replace("midlayer.", "layers.0.") not in tensors}
    assert dropped == {n for n in original if n.startswith("fc_norm.")}
    save_file(tensors | {n: original[n] for n in dropped}, file, metadata={"format": "pt"})
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"  # FlexAttention pads to 128 rows
    return SpeculatorModel.from_pretrained(str(folder), config=config).eval()


def samples(exported: Exported) -> list[Sample]:
    """Random token ids and captured states; the drafts' own layers, whatever they are."""
    generator = torch.Generator().manual_seed(5)
    names = [*(f"hidden.{i}" for i in exported.module.config.layers), "last_hidden"]
    width, vocab = exported.module.config.hidden_size, exported.module.config.vocab_size
    return [
        Sample(
            SampleId(str(length), 1),
            torch.randint(vocab, (length,), generator=generator),
            torch.ones(length, dtype=torch.bool),
            # Layers of different size, so that their order matters with fc_norm too.
            {
                name: (1 + i) * torch.randn(length, width, generator=generator)
                for i, name in enumerate(names)
            },
        )
        for length in LENGTHS
    ]


@torch.no_grad()
def our_logits(exported: Exported) -> list[Tensor]:
    """Logits [N, U] of each step; N = all rows but each sample's last, sample after sample."""
    batch = Eagle3(Eagle3Options(ttt_length=STEPS)).collate(samples(exported))
    rows = Rows.of(batch.loss_mask_BT, STEPS)
    return [exported.module.lm_head(x) for x in exported.module.unroll(batch, rows)]


@torch.no_grad()
def their_logits(exported: Exported, model: Any) -> list[Tensor]:
    """The same from speculators, which packs samples into one row as documents."""
    layers, parts = exported.module.config.layers, []
    for index, sample in enumerate(samples(exported)):
        length = len(sample.token_ids_T)
        item = {
            "input_ids": sample.token_ids_T,
            "hidden_states": torch.cat([sample.features[f"hidden.{i}"] for i in layers], -1),
            "verifier_last_hidden_states": sample.features["last_hidden"],
            "loss_mask": sample.loss_mask_T,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
        shifted = shift_batch(item)
        parts.append(shifted | {"document_ids": torch.full_like(shifted["input_ids"], index)})
    inputs = {
        name: torch.cat([part[name] for part in parts])[None]
        for name in ("input_ids", "hidden_states", "position_ids", "document_ids")
    }
    inputs["hidden_states"] = inputs["hidden_states"].to(model.dtype)
    inputs["position_ids"] -= 1  # it counts rows from 1, we from 0; rotary positions are relative
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0].float()))
    model(**inputs, ttt_steps=STEPS)
    hook.remove()
    return logits


def difference(exported: Exported, model: Any) -> float:
    """The largest difference of logits at any row and step, as a part of the largest logit.

    Step k of row t reads token t+1+k; rows where the sample is over by then are left out.
    """
    left_N = torch.cat([torch.arange(length - 1, 0, -1) for length in LENGTHS])
    worst, pairs = 0.0, zip(our_logits(exported), their_logits(exported, model), strict=True)
    for step, (ours_NU, theirs_NU) in enumerate(pairs):
        assert ours_NU.shape == theirs_NU.shape == (len(left_N), model.draft_vocab_size)
        ours, theirs = ours_NU[left_N > step], theirs_NU[left_N > step]
        worst = max(worst, float((ours - theirs).abs().max() / ours.abs().max()))
    return worst


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 7e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"draft_vocab_size": TOKENS}),
    "full vocabulary": ({}, {}),
    "norm_output": ({}, {"draft_vocab_size": TOKENS, "norm_output": True}),
    "fc_norm": ({}, {"draft_vocab_size": TOKENS, "fc_norm": True}),
    "eagle 3.1": ({}, {"draft_vocab_size": TOKENS, "fc_norm": True, "norm_output": True}),
    "square": ({"head_dim": 12}, {"draft_vocab_size": TOKENS}),
    "llama3 rope": ({"rope_parameters": LLAMA3}, {"draft_vocab_size": TOKENS}),
    "yarn": ({"rope_parameters": ROPES["yarn"]}, {"draft_vocab_size": TOKENS}),
    "gpt-oss": ({"rope_parameters": ROPES["gpt-oss"]}, {"draft_vocab_size": TOKENS}),
    "deepseek-v3": ({"rope_parameters": ROPES["deepseek-v3"]}, {"draft_vocab_size": TOKENS}),
    "other shape": (
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
        {"draft_vocab_size": TOKENS, "intermediate_size": 96, "num_key_value_heads": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_converted_draft_computes_our_logits(case: str, tmp_path: Path) -> None:
    shape, options = CASES[case]
    exported = export(tmp_path, shape, **options)
    found = difference(exported, convert(exported))
    print(f"{case}: logits differ by {found:.1e} of the largest")
    assert found < LIMIT


def test_a_draft_of_a_bf16_target_is_loaded_in_bf16_and_nothing_but_rounded(tmp_path: Path) -> None:
    exported = export(tmp_path, {}, torch.bfloat16, draft_vocab_size=TOKENS)
    model = convert(exported)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    token_ids = exported.module.token_ids()
    assert token_ids is not None
    assert torch.equal(torch.arange(TOKENS) + model.d2t, token_ids)
    found = difference(exported, model)
    print(f"as it computes, in bf16: logits differ by {found:.1e} of the largest")
    for parameter in exported.module.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    exact = difference(exported, model.float())
    print(f"both in fp32, of rounded weights: {exact:.1e}")
    assert exact < LIMIT
    assert found < HALF_LIMIT


def test_the_vocabulary_mapping_is_the_one_speculators_builds(tmp_path: Path) -> None:
    exported = export(tmp_path, {}, draft_vocab_size=TOKENS)
    model = convert(exported)
    d2t, t2d = build_vocab_mappings_from_distribution(COUNTS, TOKENS, 259)
    assert torch.equal(model.d2t, d2t)
    assert torch.equal(model.t2d, t2d)
    # Draft token i means the target token whose row of the target's head is row i of its teacher.
    ids = torch.arange(TOKENS) + model.d2t
    assert torch.equal(model.verifier_lm_head.weight, exported.target.head()[ids])
    token_ids = exported.module.token_ids()
    assert token_ids is not None
    assert torch.equal(ids, token_ids)


def test_layer_ids_mean_the_same(tmp_path: Path) -> None:
    """Our default layers are its default layers, each called one more; others pass unchanged."""
    usual = export(tmp_path / "usual", {})
    assert usual.module.config.layers == (1, 3, 4)
    with pytest.warns(UserWarning, match=r"Setting target layers to \[2, 4, 5\]"):
        model = convert(usual)
    assert model.target_layer_ids == usual.config["eagle_aux_hidden_state_layer_ids"]
    chosen = export(tmp_path / "chosen", {}, layers=[0, 2, 6])
    model = convert(chosen, chosen.config["eagle_aux_hidden_state_layer_ids"])
    assert model.target_layer_ids == [1, 3, 7]
