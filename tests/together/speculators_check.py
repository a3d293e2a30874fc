"""speculators 0.9.0 loads our exports, computes what our reader reads, and `verify` judges as it does.

Run by `nox -s speculators`; the name keeps it from being collected with the other tests, because
speculators is not installed with them. Everything on the other side is speculators' own: the
converter, the model classes, the alignment of tokens with features, the vocabulary mapping and the
default layers. `verify` reads an export by conventions that were written down here; those of `vllm`
are speculators' own. So that reader has to give speculators' logits, mistake and all. That it gives
those of the trained draft where there is none, the suite of exports shows.

Tolerance: both sides compute in fp32, in different orders. That is rounding of some 1e-7 of the
largest logit per operation, measured at most 2e-6 in all after three steps. The limit is 1e-5; a
mistake is 100 times as large. In bf16, where an operation rounds by 4e-3, it is 1.1e-2.

Three things its converter does not take from an export of EAGLE-3, found on the way:
- captured layers: they are passed as an argument, in its convention, which is that of our
  top-level field (an output of layer i is called i+1);
- the weights of `fc_norm`: it keeps the flag and drops the tensors, so `converted` puts them back;
- `partial_rotary_factor`: such a draft is loaded with full rotation, and its logits are wrong.
Not read alike, so not compared: `is_causal`, and windows, which speculators counts from a block's
anchor and servers from each row; a missing tensor of EAGLE-3, for which it warns and draws random
numbers. It knows no Domino.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from draftcore_dflash.algorithm import DFlash
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.options import Eagle3Options
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round
from draftcore_sdk.exports import ROPES, change, config_of
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor

from draftcore.cli import main
from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.target import TargetSpec
from draftcore.files import EXPORT, digest, read_sealed, write_sealed

STEPS, LIMIT = 3, 1e-5
IDS = "eagle_aux_hidden_state_layer_ids"
# 87 tokens were seen, in an order of frequency that is not that of their ids; 80 are kept.
COUNTS = {(5 * index) % 259: 300 - index for index in range(87)}
TOKENS = 80
READERS: dict[str, Any] = {"eagle3": Eagle3(None), "dflash": DFlash(None)}
BLOCKS = {"num_layers": 2, "block_size": 5, "layers": [1, 4]}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 120, "ttt_length": 3, "num_drafts": 3},
    "dflash": BLOCKS,
    "domino": {**BLOCKS, "gru_hidden_dim": 20, "emb_dim": 16},
}
Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]


class Exported(NamedTuple):
    algorithm: str
    folder: Path
    target: TargetSpec

    @property
    def config(self) -> dict[str, Any]:
        return config_of(self.folder)

    def changed(self, edit: Edit, name: str) -> Exported:
        """A copy beside it, as a writer with that mistake would have sealed it."""
        folder = self.folder.with_name(f"export-{name.replace(' ', '-')}")
        shutil.copytree(self.folder, folder)
        change(folder, edit)
        manifest = read_sealed(folder / EXPORT)
        manifest["files"] = {name: digest(folder / name) for name in manifest["files"]}
        write_sealed(folder / EXPORT, manifest)
        return self._replace(folder=folder)

    def agrees(self) -> bool:
        """What `draftcore verify` says: does the server compute the draft that was trained?"""
        asked = ["verify", str(self.folder), "--target", self.target.path, "--json"]
        result = CliRunner().invoke(main, [*asked, "--server", "vllm", "--device", "cpu"])
        (verdict,) = json.loads(result.stdout)
        assert result.exit_code == int(not verdict["agrees"]), result.output
        return bool(verdict["agrees"])

    def converted(self, layers: list[int] | None = None) -> Any:
        """The model that speculators loads, after its own conversion."""
        folder, options = self.folder.with_name(f"{self.folder.name}-converted"), {}
        if self.algorithm == "eagle3":
            options[IDS] = layers
        convert_model(
            model=str(self.folder), verifier=self.target.path, algorithm=self.algorithm,
            output_path=str(folder), **options,
        )  # fmt: skip
        if self.algorithm == "eagle3":
            tensors, original = (load_file(f / "model.safetensors") for f in (folder, self.folder))
            dropped = {n for n in original if n.replace("midlayer.", "layers.0.") not in tensors}
            assert dropped == {n for n in original if n.startswith("fc_norm.")}
            whole = tensors | {n: original[n] for n in dropped}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        config = SpeculatorModelConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = "eager"  # FlexAttention pads rows
        return SpeculatorModel.from_pretrained(str(folder), config=config).eval()


def made(
    folder: Path, shape: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any
) -> Exported:
    """Export a draft of EAGLE-3 with random weights, for a target of eight layers, through the hook."""
    path = tiny_target(folder / "target", num_hidden_layers=8, **shape)

    def cast(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    change(path, cast)
    target, summary = TransformersTarget(str(path)), DataSummary("", 1, 1, 1, 1, COUNTS)
    draft = Eagle3(Eagle3Options(ttt_length=STEPS, **options)).build_draft(target, summary)
    torch.manual_seed(4)
    for parameter in draft.module.parameters():  # norms are vectors about 1, and not equal
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    Eagle3(Eagle3Options()).export_draft(draft, folder / "export", "serving")
    return Exported("eagle3", folder / "export", target)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, make_project: Any) -> Callable[[str], Exported]:
    """The export of a short run of each algorithm, trained once."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny_target(folder, std=0.5, num_hidden_layers=8, head_dim=12)  # o_proj is square

    @functools.cache
    def make(algorithm: str) -> Exported:
        choice = {"name": algorithm, "options": OPTIONS[algorithm]}
        train = {"epochs": 2, "batch": 6, "lr": 0.01, "device": "cpu"}
        folder = tmp_path_factory.mktemp(algorithm)
        project = make_project(folder, target, algorithm=choice, train=train)
        for verb in ("train", "export"):
            project.cli(verb)
        return Exported(algorithm, project.run / "export", TransformersTarget(str(target)))

    return make


# ---------------------------------------------------------------- logits of both sides


def through(model: Any, **inputs: Any) -> list[Tensor]:
    """What the model's head gives in one forward of speculators' own."""
    logits: list[Tensor] = []
    keep = lambda _, __, out: logits.append(out[0].float().clone())  # noqa: E731
    hook = model.lm_head.register_forward_hook(keep)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return logits


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def eagle3_logits(model: Any, at: Round, drafts_K: Tensor) -> Tensor:
    """Step k of the last row that the target read reads draft k - 1, and predicts draft k."""
    length, last = len(at.tokens_T), at.tokens_T.new_tensor([at.last])
    ids_T = torch.cat([at.tokens_T, last, drafts_K])
    beyond = (0, 0, 0, len(ids_T) - length)
    states_TH = torch.nn.functional.pad(torch.cat(at.hidden, -1), beyond)
    shifted = shift_batch({
        "input_ids": ids_T, "hidden_states": states_TH.to(model.dtype),
        "verifier_last_hidden_states": states_TH, "lengths": torch.tensor([len(ids_T)]),
        "loss_mask": torch.ones_like(ids_T, dtype=torch.bool),
        "position_ids": torch.arange(len(ids_T)),
    })  # fmt: skip
    names = ("input_ids", "hidden_states", "position_ids")
    inputs = {name: shifted[name][None] for name in names}
    inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])
    steps = through(model, **inputs, ttt_steps=len(drafts_K) + 1)
    return torch.stack([logits_NU[length - 1] for logits_NU in steps])


def dflash_logits(model: Any, at: Round, drafts_K: Tensor) -> Tensor:
    """One block, anchored at the last token; its context is all that the target read."""
    length, total = len(at.tokens_T), len(at.tokens_T) + 1 + model.block_size
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, :length], ids[0, length] = at.tokens_T, at.last
    anchor = torch.zeros(1, total, dtype=torch.bool)
    anchor[0, length] = True
    joined = torch.nn.functional.pad(torch.cat(at.hidden, -1), (0, 0, 0, total - length))[None]
    (logits_SV,) = through(
        model, hidden_states=joined, input_ids=ids, loss_mask=anchor, max_anchors=1,
        verifier_last_hidden_states=joined[..., : at.host.hidden_size],
        document_ids=torch.zeros_like(ids),
        loss_config=resolve_loss_config("ce", "eager"),  # its default wants Triton; unused here
    )  # fmt: skip
    return logits_SV[1 : len(drafts_K) + 2]


LOGITS = {"eagle3": eagle3_logits, "dflash": dflash_logits}


@functools.cache
def both(exported: Exported, computed: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The logits of our reader and of speculators, [K + 1, U], over the tokens that both propose.

    With weights as speculators loads them, rounded to the export's dtype; ours are `computed` in fp32.
    """
    reader: Any = READERS[exported.algorithm].read_export(exported.folder, "vllm")
    model, host = exported.converted(exported.config.get(IDS)), Host.of(exported.target)

    def rounded(x: Tensor) -> Tensor:
        return x.to(model.dtype).float() if x.is_floating_point() else x

    reader = replace(reader, tensors={name: rounded(x) for name, x in reader.tensors.items()})
    layers = reader.captured(host)
    assert [layer + 1 for layer in layers] == model.target_layer_ids
    generator, length = torch.Generator().manual_seed(3), 17
    tokens = torch.randint(host.vocab_size, (length + STEPS,), generator=generator)
    # Layers of different size, so that their order matters with fc_norm too.
    shape = length, host.hidden_size
    hidden = [(1 + i) * torch.randn(shape, generator=generator) for i in range(len(layers))]
    embedding, head = rounded(host.embedding_VH), rounded(host.head_VH)
    seen = replace(host, embedding_VH=embedding, head_VH=head)
    at = Round(seen, tokens[:length], int(tokens[length]), tuple(hidden), hidden[0])
    drafts_K = tokens[length + 1 :]
    theirs_KU = LOGITS[exported.algorithm](model.to(computed), at, drafts_K)
    ours_KV = reader.logits(at, drafts_K)
    ids_U = torch.arange(theirs_KU.shape[1])
    if getattr(model, "d2t", None) is not None:
        ids_U = ids_U + model.d2t
    others = torch.ones(host.vocab_size, dtype=torch.bool).index_fill(0, ids_U, False)
    assert bool((ours_KV[:, others] == -torch.inf).all())
    return ours_KV[:, ids_U], theirs_KU


# ---------------------------------------------------------------- EAGLE-3 of many shapes

LLAMA3 = {**ROPES["llama3"], "original_max_position_embeddings": 64}
WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "full vocabulary": ({}, {"draft_vocab_size": None}),
    "norm_output": ({}, {"norm_output": True}),
    "fc_norm": ({}, {"fc_norm": True}),
    "eagle 3.1": ({}, {"fc_norm": True, "norm_output": True}),
    "square": ({"head_dim": 12}, {}),
    "llama3 rope": ({"rope_parameters": LLAMA3}, {}),
    **{n: ({"rope_parameters": ROPES[n]}, {}) for n in ("yarn", "gpt-oss", "deepseek-v3")},
    "other shape": (WIDE, {"intermediate_size": 96, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_converted_draft_computes_what_our_reader_does(case: str, tmp_path: Path) -> None:
    shape, options = CASES[case]
    exported = made(tmp_path, shape, **{"draft_vocab_size": TOKENS, **options})
    assert gap(*both(exported)) < LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_loaded_in_the_targets_dtype_with_the_vocabulary_that_speculators_builds(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    exported = made(tmp_path, {}, dtype, draft_vocab_size=TOKENS)
    model = exported.converted()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    d2t, t2d = build_vocab_mappings_from_distribution(COUNTS, TOKENS, 259)
    assert torch.equal(model.d2t, d2t)
    assert torch.equal(model.t2d, t2d)
    # Draft token i means the target token whose row of the target's head is row i of its teacher.
    ids = torch.arange(TOKENS) + model.d2t
    assert torch.equal(model.verifier_lm_head.weight, exported.target.head()[ids])


def test_layer_ids_mean_the_same(tmp_path: Path) -> None:
    """Our default layers are its default layers, each called one more; others pass unchanged."""
    usual = made(tmp_path / "usual", {})
    with pytest.warns(UserWarning, match=r"Setting target layers to \[2, 4, 5\]"):
        model = usual.converted()
    assert model.target_layer_ids == usual.config[IDS] == [2, 4, 5]
    chosen = made(tmp_path / "chosen", {}, layers=[0, 2, 6])
    assert chosen.converted(chosen.config[IDS]).target_layer_ids == [1, 3, 7]


# ---------------------------------------------------------------- what `verify` says


def theta(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def turn(name: str) -> Edit:
    return lambda _, tensors: tensors.update({name: tensors[name].T})


def put(**fields: Any) -> Edit:
    return lambda config, _: config.update(fields)


def nested(**fields: Any) -> Edit:
    return lambda config, _: config["dflash_config"].update(fields)


MISTAKES: dict[str, Edit] = {
    "eagle3, norm_output": put(norm_output=True),
    "eagle3, theta": theta,
    "eagle3, eps": put(rms_norm_eps=0.5),
    "dflash, theta": theta,
    "dflash, eps": put(rms_norm_eps=0.5),
    "dflash, mask token": nested(mask_token_id=100),
}


@pytest.mark.parametrize("algorithm", READERS)
def test_a_clean_export_is_read_alike_and_verified(algorithm: str, runs: Any) -> None:
    assert gap(*both(exported := runs(algorithm))) < LIMIT
    assert exported.agrees()


def test_an_export_for_a_bf16_target_is_loaded_in_bf16_and_read_alike(runs: Any) -> None:
    """Of EAGLE-3, that is: it loads DFlash in fp32, whatever the export says."""
    half = runs("eagle3").changed(put(dtype="bfloat16", torch_dtype="bfloat16"), "bf16")
    assert half.converted(half.config[IDS]).dtype == torch.bfloat16
    (ours, theirs), (_, clean) = both(half), both(runs("eagle3"))
    assert gap(ours, theirs) < LIMIT
    assert LIMIT < gap(clean, theirs) < 6e-3
    assert gap(*both(half, torch.bfloat16)) < 0.03
    assert half.agrees()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_read_alike_and_not_verified(mistake: str, runs: Any) -> None:
    exported = runs(mistake.partition(",")[0])
    damaged = exported.changed(MISTAKES[mistake], mistake)
    (ours, theirs), (_, clean) = both(damaged), both(exported)
    assert gap(ours, theirs) < LIMIT
    assert gap(clean, theirs) > 100 * LIMIT
    assert not damaged.agrees()


REFUSED: dict[str, Edit] = {
    "eagle3, head transposed": turn("lm_head.weight"),
    "dflash, fc transposed": turn("fc.weight"),
    "dflash, no norm": lambda _, tensors: tensors.pop("layers.1.self_attn.k_norm.weight"),
    "dflash, no block size": lambda config, _: (
        config.pop("block_size", None), config["dflash_config"].pop("block_size", None)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_speculators_refuses_is_not_verified(mistake: str, runs: Any) -> None:
    damaged = runs(mistake.partition(",")[0]).changed(REFUSED[mistake], mistake)
    with pytest.raises((ValueError, RuntimeError)):
        damaged.converted(damaged.config.get(IDS))
    assert not damaged.agrees()


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_in_the_other_convention_are_not_verified(shift: int, runs: Any) -> None:
    """speculators takes them as they stand, as vLLM does: other layers than those trained on."""
    exported = runs("dflash")
    trained = exported.converted().target_layer_ids
    ids = [layer + shift for layer in exported.config["dflash_config"]["target_layer_ids"]]
    damaged = exported.changed(nested(target_layer_ids=ids), f"shift-{shift}")
    assert damaged.converted().target_layer_ids == [layer + shift for layer in trained]
    assert not damaged.agrees()


def test_a_domino_export_is_refused_rather_than_loaded_without_its_head(runs: Any) -> None:
    with pytest.raises(ValueError, match="prefix_gru"):
        runs("domino")._replace(algorithm="dflash").converted()
