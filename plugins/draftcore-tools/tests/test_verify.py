"""`draftcore verify`: an export agrees with its checkpoint, and each mistake is explained."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.drafter import DFlashDrafter
from draftcore_eagle3.algorithm import Eagle3
from draftcore_nn.served import served_rope
from draftcore_sdk.targets import tiny_target
from draftcore_tools.verify import LIMIT
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.errors import UsageError
from draftcore.files import read_sealed, write_sealed

Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("algorithm", "options", "servers"),
    [
        ("eagle3", {}, ["sglang", "vllm"]),
        ("eagle3", {"draft_vocab_size": None}, ["sglang", "vllm"]),
        ("eagle3", {"fc_norm": True, "norm_output": True}, ["sglang", "vllm"]),
        ("dflash", {}, ["sglang", "vllm"]),
        ("dflash", {"sliding_window": 6}, ["sglang", "vllm"]),
        ("dflash", {"sliding_window": 6, "is_causal": False}, ["sglang", "vllm"]),
        ("domino", {}, ["sglang"]),
        ("domino", {"shift_label": False}, ["sglang"]),
    ],
)
def test_an_export_agrees_with_its_checkpoint(
    algorithm: str, options: dict[str, Any], servers: list[str], make_run: Any
) -> None:
    verdicts = make_run(algorithm, **options).verify(status=0)
    assert [verdict["server"] for verdict in verdicts] == servers
    for verdict in verdicts:
        assert verdict["agrees"]
        assert verdict["rounds"] == 12
        assert verdict["notes"] == []
        assert verdict["gap"] < LIMIT / 20, "the limit is far above rounding"


# ---------------------------------------------------------------- mutations


def nested(name: str, section: str, change: Callable[[Any], Any]) -> Edit:
    return lambda config, _: config[section].update({name: change(config[section][name])})


def top(name: str, change: Callable[[Any], Any]) -> Edit:
    return lambda config, _: config.update({name: change(config[name])})


def put(name: str, value: float) -> Edit:
    return lambda config, _: config.update({name: value})


def shifted(by: int) -> Callable[[Any], Any]:
    return lambda ids: [layer + by for layer in ids]


def theta(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def absolute(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def transpose(name: str) -> Edit:
    return lambda _, tensors: tensors.update({name: tensors[name].T})


def drop(name: str) -> Edit:
    return lambda _, tensors: tensors.pop(name)


EAGLE, DFLASH = "eagle_config", "dflash_config"
HIGH, LOW = "the layer ids are one too high", "the layer ids are one too low"
BOTH = ("sglang", "vllm")
# by algorithm and mistake: what is done to its export, at which check that is noticed, why, and by whom
MUTATIONS: dict[str, tuple[Edit, str, str, tuple[str, ...]]] = {
    "eagle3, ids for sglang + 1": (
        nested(IDS, EAGLE, shifted(1)), "captured layers", HIGH, ("sglang",)),
    "eagle3, ids for sglang - 1": (
        nested(IDS, EAGLE, shifted(-1)), "captured layers", LOW, ("sglang",)),
    "eagle3, ids for vllm + 1": (top(IDS, shifted(1)), "captured layers", HIGH, ("vllm",)),
    "eagle3, ids for vllm - 1": (top(IDS, shifted(-1)), "captured layers", LOW, ("vllm",)),
    "eagle3, d2t of ids": (absolute, "drafting", "d2t holds token ids", BOTH),
    "eagle3, norm_output": (
        top("norm_output", lambda x: not x), "log-probabilities",
        "norm_output is True, and the draft was trained with False", BOTH),
    "eagle3, head": (transpose("lm_head.weight"), "loading", "it is transposed", BOTH),
    "eagle3, theta": (
        theta, "log-probabilities",
        "rope_theta is 100.0, and the draft was trained with 10000.0", BOTH),
    "eagle3, one theta of two": (
        top("rope_theta", lambda x: 100.0), "loading", "two values of rope_theta", BOTH),
    "eagle3, no d2t": (drop("d2t"), "loading", "its tokens mean nothing", BOTH),
    "eagle3, no fc": (
        drop("fc.weight"), "loading", "the tensor fc.weight [48, 144] is missing", BOTH),
    "eagle3, a square matrix": (
        transpose("midlayer.self_attn.o_proj.weight"), "log-probabilities",
        "the tensor midlayer.self_attn.o_proj.weight is transposed", BOTH),
    "eagle3, another eps": (
        top("rms_norm_eps", lambda x: 0.5), "log-probabilities",
        "config.json has rms_norm_eps: 0.5, a fresh export 1e-06", BOTH),
    "eagle3, a scale that vLLM reads": (
        put("logit_scale", 0.25), "log-probabilities",
        "config.json has logit_scale: 0.25, a fresh export None", ("vllm",)),
    "eagle3, a cap that sglang reads": (
        put("final_logit_softcapping", 1.0), "log-probabilities",
        "config.json has final_logit_softcapping: 1.0, a fresh export None", ("sglang",)),
    "dflash, a scale that vLLM reads": (
        put("logit_scale", 0.25), "log-probabilities",
        "config.json has logit_scale: 0.25, a fresh export None", ("vllm",)),
    "dflash, ids + 1": (
        nested("target_layer_ids", DFLASH, shifted(1)), "captured layers", HIGH, BOTH),
    "dflash, ids - 1": (
        nested("target_layer_ids", DFLASH, shifted(-1)), "captured layers", LOW, BOTH),
    "dflash, mask token": (
        nested("mask_token_id", DFLASH, lambda x: 100), "log-probabilities",
        "the mask token is 100, and the draft was trained with 258", BOTH),
    "dflash, a mask token that is none": (
        nested("mask_token_id", DFLASH, lambda x: 9999), "config",
        "the mask token is 9999, and the draft was trained with 258", BOTH),
    "dflash, theta": (theta, "log-probabilities", "the draft was trained with 10000.0", BOTH),
    "dflash, causal": (
        top("is_causal", lambda x: True), "log-probabilities", "trained with is_causal: false", BOTH),
    "dflash, block size": (
        nested("block_size", DFLASH, lambda x: 4), "block size",
        "the block size is 4, and the draft was trained with 5", BOTH),
    "dflash, a norm dropped": (
        drop("layers.1.self_attn.k_norm.weight"), "loading", "is missing", BOTH),
    "domino, ids + 1": (
        nested("target_layer_ids", DFLASH, shifted(1)), "captured layers", HIGH, ("sglang",)),
    "domino, no GRU": (
        drop("prefix_gru.weight_hh_l0"), "loading",
        "the tensor prefix_gru.weight_hh_l0 [60, 20] is missing: sglang refuses the draft", ("sglang",)),
    "domino, shift_label": (
        nested("shift_label", DFLASH, lambda x: not x), "log-probabilities",
        "shift_label is False, and the draft was trained with True", ("sglang",)),
    "domino, its research name": (
        nested("projector_type", DFLASH, lambda x: "causal_v5"), "loading",
        "sglang knows this head as 'domino' only", ("sglang",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found_and_explained(name: str, exported: Any, judge: Any) -> None:
    edit, check, why, servers = MUTATIONS[name]
    damaged = exported(name.partition(",")[0])
    damaged.change(edit)
    noticed = {server: found for server, found in judge(damaged).items() if found is not None}
    assert tuple(noticed) == servers
    for found in noticed.values():
        assert found.check == check
        assert why in f"{found.what}\n{found.cause}"


def test_ids_for_offsets_are_explained_where_they_pass_for_offsets(exported: Any) -> None:
    damaged = exported("eagle3", draft_vocab_size=5)
    damaged.change(absolute)
    for verdict in damaged.verify(status=1):
        assert verdict["divergence"]["check"] == "log-probabilities"
        assert verdict["divergence"]["cause"].startswith("d2t holds token ids")


def test_another_chat_template_is_found(exported: Any, tmp_path: Path) -> None:
    run = exported("dflash")
    target = shutil.copytree(run.target, tmp_path / "target")
    template = target / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_end|>"))
    (verdict, _) = run.verify("--target", target, status=1)
    assert verdict["divergence"]["check"] == "chat template"
    assert "the template was changed after training" in verdict["divergence"]["cause"]


def test_the_report_is_in_plain_words(exported: Any) -> None:
    damaged = exported("eagle3")
    damaged.change(nested(IDS, EAGLE, shifted(1)))
    result = damaged.ask("--server", "sglang")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "sglang: differs from the trained draft at: captured layers",
        "  trained on the outputs of layers [1, 3, 4] (transformers' hidden_states [2, 4, 5])",
        "  the server would feed the outputs [2, 4, 5] (transformers' hidden_states [3, 5, 6])",
        "  cause: the layer ids are one too high: sglang takes "
        f"eagle_config.{IDS} for outputs of layers, and they are written in the other convention",
    ]


def test_what_a_server_leaves_unread_is_named_and_what_ends_one_is_refused(exported: Any) -> None:
    run = exported("dflash")
    run.change(lambda _, tensors: tensors.update(d2t=torch.arange(3)))
    sglang, vllm = run.verify("--run", run.run, status=1)
    assert sglang["agrees"]
    assert sglang["notes"] == ["the server leaves unread: d2t"]
    assert vllm["divergence"]["check"] == "loading"
    assert "has no place for: d2t" in vllm["divergence"]["what"]


BY_FACTOR = 0.1 * math.log(40) + 1
SCALES: list[tuple[dict[str, float], float, float]] = [
    ({}, BY_FACTOR, BY_FACTOR),
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
    ({"mscale": 1.0}, BY_FACTOR, BY_FACTOR),
    ({"attn_factor": 0.5}, 0.5 * BY_FACTOR, BY_FACTOR),
    ({"attention_factor": 0.5}, BY_FACTOR, 0.5),
    ({"mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 2.0}, 2.0, 1.0),
]


@pytest.mark.parametrize(("fields", "sglang", "vllm"), SCALES)
def test_each_server_has_a_rule_of_its_own_for_the_scale_of_yarn(
    fields: dict[str, float], sglang: float, vllm: float
) -> None:
    config = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, **fields}}
    found = [served_rope(config, name)["attention_factor"] for name in ("sglang", "vllm")]
    assert found == pytest.approx([sglang, vllm])


# ---------------------------------------------------------------- what is compared with what


def test_the_run_can_be_named_and_must_be_when_it_moved_and_prompts_may_come_from_a_file(
    exported: Any, tmp_path: Path
) -> None:
    run = exported("dflash")
    moved = shutil.copytree(run.folder, tmp_path / "moved")
    alone = type(run)(run.algorithm, moved, run.target, run.run)
    (checkpoint,) = (run.run / "checkpoints").glob("step-*")
    alone.verify("--run", checkpoint, status=0)
    file = run.run.parent / "train.jsonl"
    (verdict, _) = alone.verify("--run", run.run, "--prompts", file, status=0)
    assert verdict["rounds"] == 12
    result = alone.ask()
    assert result.exit_code == 2
    assert "give the run's folder, or the checkpoint's, with --run" in result.output


def test_a_checkpoint_of_another_step_and_another_target_are_refused(
    exported: Any, tmp_path: Path
) -> None:
    run = exported("dflash")
    other = tiny_target(tmp_path / "other", seed=1, std=0.5, num_hidden_layers=8)
    result = run.ask("--target", other)
    assert (result.exit_code, "was trained otherwise" in result.output) == (2, True)
    file = run.folder / "draftcore.json"
    write_sealed(file, {**read_sealed(file), "step": 3})
    result = run.ask("--run", run.run)
    assert (result.exit_code, "is of step 3" in result.output) == (2, True)


def test_one_other_byte_of_any_file_is_found_though_nothing_is_drafted_otherwise(
    exported: Any, judge: Any
) -> None:
    run = exported("dflash")
    file = run.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) - len(data) % 4 - 4] ^= 1  # the last of a number's
    file.write_bytes(data)
    for divergence in judge(run).values():
        assert divergence.check == "files"
        assert "model.safetensors was altered" in divergence.what
    config = (other := exported("domino")).folder / "config.json"
    config.write_text(config.read_text() + " ")
    for divergence in judge(other).values():
        assert "config.json was altered" in divergence.what


def test_an_unknown_server_is_answered_with_the_known(exported: Any) -> None:
    run = exported("domino")
    result = run.ask("--server", "vllm")
    assert result.exit_code == 2
    assert "this draft can be read as: sglang" in result.output
    with pytest.raises(UsageError, match="sglang, vllm"):
        Eagle3(None).read_export(run.folder, "sgland")


def test_drafts_that_are_no_whole_chains_are_refused(
    exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = DFlashDrafter.propose

    def fewer(self: DFlashDrafter, *given: Any) -> Proposal:
        return replace(propose(self, *given), counts_B=torch.tensor([2]))

    monkeypatch.setattr(DFlashDrafter, "propose", fewer)
    result = exported("dflash").ask()
    assert result.exit_code == 2
    assert "or fewer tokens than 4, and verify compares whole chains" in result.output
