"""`draftcore verify` judges an export as speculators' own loader computes it.

Run by `nox -s speculators`, as `speculators_check` is. `verify` reads an export by conventions that
were written down here; this asks a reader that others wrote. Each export, clean and with a mistake, is
converted and loaded by speculators 0.9.0. Its logits must be those of our reader, mistake and all,
and `verify` must agree with the trained draft exactly where speculators computes that draft's.

Not read alike, so not compared: `is_causal`, and windows, which speculators counts from a block's
anchor and servers from each row; a missing tensor of EAGLE-3, for which it warns and draws random
numbers; the captured layers of EAGLE-3, which it wants as an argument. It knows no Domino.

Tolerance: fp32 in different orders, as in `speculators_check`; a mistake is 100 times as large.
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
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round, ServedDraft
from draftcore_sdk.exports import change, config_of
from draftcore_sdk.targets import tiny_target
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from torch import Tensor

from draftcore.cli import main
from draftcore.contracts.target import TargetSpec

LIMIT, HALF_LIMIT = 1e-5, 6e-3  # of weights in fp32, and rounded to bf16
BF16 = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
SERVER = "vllm"  # whose conventions are speculators' own
IDS = "eagle_aux_hidden_state_layer_ids"
ALGORITHMS: dict[str, Any] = {"eagle3": Eagle3(None), "dflash": DFlash(None)}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 120, "ttt_length": 3, "num_drafts": 3},
    "dflash": {"num_layers": 2, "block_size": 5, "layers": [1, 4]},
    "domino": {
        "num_layers": 2, "block_size": 5, "layers": [1, 4], "gru_hidden_dim": 20, "emb_dim": 16,
    },
}  # fmt: skip
Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]


class Exported(NamedTuple):
    algorithm: str
    folder: Path
    target: TargetSpec

    def changed(self, edit: Edit, name: str) -> Exported:
        """A copy beside it, with another config.json or other tensors."""
        folder = self.folder.with_name(f"export-{name}")
        shutil.copytree(self.folder, folder)
        change(folder, edit)
        return self._replace(folder=folder)

    def agrees(self) -> bool:
        """What `draftcore verify` says: does the server compute the draft that was trained?"""
        asked = ["verify", str(self.folder), "--target", self.target.path, "--json"]
        result = CliRunner().invoke(main, [*asked, "--server", SERVER, "--device", "cpu"])
        (verdict,) = json.loads(result.stdout)
        assert result.exit_code == int(not verdict["agrees"]), result.output
        return bool(verdict["agrees"])

    def read(self) -> ServedDraft:
        found: ServedDraft = ALGORITHMS[self.algorithm].read_export(self.folder, SERVER)
        return found

    def converted(self) -> Any:
        """The model that speculators loads, after its own conversion."""
        folder, options = self.folder.with_name(f"{self.folder.name}-converted"), {}
        if self.algorithm == "eagle3":
            layers = config_of(self.folder)[IDS]
            options = {"eagle_aux_hidden_state_layer_ids": layers}
        convert_model(
            model=str(self.folder), verifier=self.target.path, algorithm=self.algorithm,
            output_path=str(folder), **options,
        )  # fmt: skip
        config = SpeculatorModelConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = "eager"
        return SpeculatorModel.from_pretrained(str(folder), config=config).eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, make_project: Any) -> Callable[[str], Exported]:
    """The export of a short run of each algorithm, trained once."""
    target = tiny_target(
        tmp_path_factory.mktemp("target"), std=0.5, num_hidden_layers=8, head_dim=12
    )  # o_proj is square
    made: dict[str, Exported] = {}

    def make(algorithm: str) -> Exported:
        if algorithm not in made:
            choice = {"name": algorithm, "options": OPTIONS[algorithm]}
            train = {"epochs": 2, "batch": 6, "lr": 0.01, "device": "cpu"}
            folder = tmp_path_factory.mktemp(algorithm)
            project = make_project(folder, target, algorithm=choice, train=train)
            for verb in ("train", "export"):
                project.cli(verb)
            made[algorithm] = Exported(
                algorithm, project.run / "export", TransformersTarget(str(target))
            )
        return made[algorithm]

    return make


def a_round(target: TargetSpec, count: int, layers: int) -> tuple[Round, Tensor]:
    """A made-up place to draft from, and drafts; layers differ in size, so that order matters."""
    generator = torch.Generator().manual_seed(3)
    host, length = Host.of(target), 17
    tokens = torch.randint(host.vocab_size, (length + 1 + count,), generator=generator)
    hidden = tuple(
        (1 + layer) * torch.randn(length, host.hidden_size, generator=generator)
        for layer in range(layers)
    )
    at = Round(host, tokens[:length], int(tokens[length]), hidden, hidden[0])
    return at, tokens[length + 1 :]


def through(model: Any, **inputs: Any) -> list[Tensor]:
    """What the model's head gives in one forward of speculators' own."""
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0].clone()))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return logits


def eagle3_logits(model: Any, at: Round, drafts_K: Tensor) -> Tensor:
    """Step k of the last row that the target read reads draft k - 1, and predicts draft k."""
    length, last = len(at.tokens_T), at.tokens_T.new_tensor([at.last])
    ids = torch.cat([at.tokens_T, last, drafts_K])
    total = len(ids)
    joined = torch.cat(at.hidden, -1)
    shifted = shift_batch({
        "input_ids": ids,
        "hidden_states": torch.nn.functional.pad(joined, (0, 0, 0, total - length)),
        "verifier_last_hidden_states": torch.zeros(total, joined.shape[1] // len(at.hidden)),
        "loss_mask": torch.ones(total, dtype=torch.bool),
        "lengths": torch.tensor([total]),
        "position_ids": torch.arange(total),
    })  # fmt: skip
    names = ("input_ids", "hidden_states", "position_ids")
    inputs = {name: shifted[name][None] for name in names}
    inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])
    steps = through(model, **inputs, ttt_steps=len(drafts_K) + 1)
    return torch.stack([logits_NU[length - 1] for logits_NU in steps])


def dflash_logits(model: Any, at: Round, drafts_K: Tensor) -> Tensor:
    """One block, anchored at the last token; its context is all that the target read."""
    length, size = len(at.tokens_T), model.block_size
    total = length + 1 + size
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, :length], ids[0, length] = at.tokens_T, at.last
    anchor = torch.zeros(1, total, dtype=torch.bool)
    anchor[0, length] = True
    joined = torch.nn.functional.pad(torch.cat(at.hidden, -1), (0, 0, 0, total - length))[None]
    (logits_SV,) = through(
        model,
        hidden_states=joined,
        input_ids=ids,
        loss_mask=anchor,
        verifier_last_hidden_states=joined[..., : at.host.hidden_size],
        document_ids=torch.zeros_like(ids),
        max_anchors=1,
        loss_config=resolve_loss_config("ce", "eager"),  # its default wants Triton; unused here
    )
    return logits_SV[1 : len(drafts_K) + 2]


LOGITS = {"eagle3": eagle3_logits, "dflash": dflash_logits}


@functools.cache
def both(exported: Exported, count: int = 2) -> tuple[Tensor, Tensor]:
    """The logits of our reader and of speculators, [K + 1, U], over the tokens that both propose.

    Both compute in fp32, with weights as speculators loads them: rounded to the export's dtype.
    """
    reader: Any = exported.read()
    model, host = exported.converted(), Host.of(exported.target)

    def rounded(x: Tensor) -> Tensor:
        return x.to(model.dtype).float() if x.is_floating_point() else x

    reader = replace(reader, tensors={name: rounded(x) for name, x in reader.tensors.items()})
    layers = reader.captured(host)
    assert [layer + 1 for layer in layers] == model.target_layer_ids
    at, drafts_K = a_round(exported.target, count, len(layers))
    embedding, head = rounded(host.embedding_VH), rounded(host.head_VH)
    at = replace(at, host=replace(host, embedding_VH=embedding, head_VH=head))
    theirs_KU = LOGITS[exported.algorithm](model.float(), at, drafts_K)
    ours_KV = reader.logits(at, drafts_K)
    ids_U = torch.arange(theirs_KU.shape[1])
    if getattr(model, "d2t", None) is not None:
        ids_U = ids_U + model.d2t
    others = torch.ones(host.vocab_size, dtype=torch.bool).index_fill(0, ids_U, False)
    assert bool((ours_KV[:, others] == -torch.inf).all())
    return ours_KV[:, ids_U], theirs_KU


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def theta(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def swap(one: str, other: str) -> Edit:
    def edit(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return edit


def turn(name: str) -> Edit:
    return lambda _, tensors: tensors.update({name: tensors[name].T})


def put(name: str, value: Any) -> Edit:
    return lambda config, _: config.update({name: value})


MISTAKES: dict[str, tuple[str, Edit]] = {
    "eagle3, norm_output": ("eagle3", put("norm_output", True)),
    "eagle3, theta": ("eagle3", theta),
    "eagle3, eps": ("eagle3", put("rms_norm_eps", 0.5)),
    "eagle3, a square matrix": ("eagle3", turn("midlayer.self_attn.o_proj.weight")),
    "eagle3, gate for up": (
        "eagle3", swap("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")),
    "dflash, theta": ("dflash", theta),
    "dflash, eps": ("dflash", put("rms_norm_eps", 0.5)),
    "dflash, a square matrix": ("dflash", turn("layers.1.self_attn.o_proj.weight")),
    "dflash, layers swapped": (
        "dflash", swap("layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight")),
    "dflash, mask token": (
        "dflash", lambda config, _: config["dflash_config"].update(mask_token_id=100)),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_clean_export_is_read_alike_and_verified(algorithm: str, runs: Any) -> None:
    exported = runs(algorithm)
    ours, theirs = both(exported)
    print(f"{algorithm}: logits differ by {gap(ours, theirs):.1e} of the largest")
    assert gap(ours, theirs) < LIMIT
    assert exported.agrees()


def test_an_export_for_a_bf16_target_is_loaded_in_bf16_and_read_alike(runs: Any) -> None:
    """Of EAGLE-3, that is: it loads DFlash in fp32, whatever the export says."""
    half = runs("eagle3").changed(lambda config, _: config.update(BF16), "bf16")
    assert half.converted().dtype == torch.bfloat16
    (ours, theirs), (_, clean) = both(half), both(runs("eagle3"))
    print(f"read alike {gap(ours, theirs):.1e}, from fp32 {gap(clean, theirs):.1e}")
    assert gap(ours, theirs) < LIMIT
    assert LIMIT < gap(clean, theirs) < HALF_LIMIT
    assert half.agrees()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_read_alike_and_not_verified(mistake: str, runs: Any) -> None:
    algorithm, edit = MISTAKES[mistake]
    damaged = runs(algorithm).changed(edit, mistake.replace(" ", "-"))
    (ours, theirs), (_, clean) = both(damaged), both(runs(algorithm))
    print(
        f"{mistake}: from ours {gap(ours, theirs):.1e}, from the clean one {gap(clean, theirs):.1e}"
    )
    assert gap(ours, theirs) < LIMIT
    assert gap(clean, theirs) > 100 * LIMIT
    assert not damaged.agrees()


REFUSED: dict[str, tuple[str, Edit]] = {
    "eagle3, head transposed": ("eagle3", turn("lm_head.weight")),
    "dflash, fc transposed": ("dflash", turn("fc.weight")),
    "dflash, a norm dropped": (
        "dflash", lambda _, tensors: tensors.pop("layers.1.self_attn.k_norm.weight")),
    "dflash, no block size": ("dflash", lambda config, _: (
        config.pop("block_size", None), config["dflash_config"].pop("block_size", None))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_speculators_refuses_is_not_verified(mistake: str, runs: Any) -> None:
    algorithm, edit = REFUSED[mistake]
    damaged = runs(algorithm).changed(edit, mistake.replace(" ", "-"))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        damaged.converted()
    print(f"{mistake}: {str(caught.value)[:200]}")
    assert not damaged.agrees()


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_in_the_other_convention_are_not_verified(shift: int, runs: Any) -> None:
    """speculators takes them as they stand, as vLLM does: other layers than those trained on."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        ids = config["dflash_config"]["target_layer_ids"]
        config["dflash_config"]["target_layer_ids"] = [layer + shift for layer in ids]

    exported = runs("dflash")
    trained = exported.converted().target_layer_ids
    damaged = exported.changed(edit, f"shift-{shift}")
    assert damaged.converted().target_layer_ids == [layer + shift for layer in trained]
    assert not damaged.agrees()


def test_a_domino_export_is_refused_rather_than_loaded_without_its_head(runs: Any) -> None:
    exported = runs("domino")
    with pytest.raises(ValueError, match="prefix_gru"):
        exported._replace(algorithm="dflash").converted()
