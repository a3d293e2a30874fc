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
from draftcore_eagle3 import plugin as eagle3
from draftcore_eagle3.algorithm import Eagle3
from draftcore_nn.served import served_rope
from draftcore_sdk.targets import tiny_target
from draftcore_tools.verify import LIMIT
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.errors import UsageError
from draftcore.files import read_sealed, write_sealed

Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]
BOTH = "sglang vllm"


SERVERS = {"eagle3": BOTH, "dflash": BOTH, "dflash2": BOTH, "domino": "sglang", "peagle": "vllm"}


@pytest.mark.parametrize("algorithm", SERVERS)
def test_an_export_agrees_with_its_checkpoint(algorithm: str, make_run: Any) -> None:
    """Of each whose mistakes are told below; the suites of exports try its options."""
    verdicts = make_run(algorithm).verify(status=0)
    assert [verdict["server"] for verdict in verdicts] == SERVERS[algorithm].split()
    for verdict in verdicts:
        assert (verdict["agrees"], verdict["rounds"], verdict["notes"]) == (True, 12, [])
        assert verdict["gap"] < LIMIT / 20, "the limit is far above rounding"


# ---------------------------------------------------------------- mutations


def put(key: str, value: Any) -> Edit:
    """Set a key of config.json, or of a section of it."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        *section, name = key.split(".")
        (config[section[0]] if section else config)[name] = value

    return edit


def theta(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def absolute(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def turn(name: str) -> Edit:
    return lambda _, tensors: tensors.update({name: tensors[name].T})


def drop(name: str) -> Edit:
    return lambda _, tensors: tensors.pop(name)


def exchange(*names: str) -> Edit:
    """Give two codebooks of a selector each other's name."""
    one, other = (f"candidate_selector.{name}_codebook" for name in names)
    return lambda _, tensors: tensors.update({one: tensors[other], other: tensors[one]})


IDS = "eagle_aux_hidden_state_layer_ids"
OURS, BLOCK = f"eagle_config.{IDS}", "dflash_config.target_layer_ids"
HIGH, LOW = "the layer ids are one too high", "the layer ids are one too low"
LAYERS, LOGP, LOAD = "captured layers", "log-probabilities", "loading"
O_PROJ, GRU = "midlayer.self_attn.o_proj.weight", "prefix_gru.weight_hh_l0"
OTHERWISE = "is {}, and the draft was trained with {}".format
FRESH = "config.json has {}, a fresh export {}".format
# By whom a mistake is noticed in an export that had none, at which check, and why.
MUTATIONS: list[tuple[str, str, Edit, str, str]] = [
    ("eagle3", "sglang", put(OURS, [2, 4, 5]), LAYERS, HIGH),
    ("eagle3", "sglang", put(OURS, [0, 2, 3]), LAYERS, LOW),
    ("eagle3", "vllm", put(IDS, [3, 5, 6]), LAYERS, HIGH),
    ("eagle3", "vllm", put(IDS, [1, 3, 4]), LAYERS, LOW),
    ("eagle3", BOTH, absolute, "drafting", "d2t holds token ids"),
    ("eagle3", BOTH, put("norm_output", True), LOGP, "norm_output " + OTHERWISE(True, False)),
    ("eagle3", BOTH, turn("lm_head.weight"), LOAD, "it is transposed"),
    ("eagle3", BOTH, theta, LOGP, "rope_theta " + OTHERWISE(100.0, 10000.0)),
    ("eagle3", BOTH, put("rope_theta", 100.0), LOAD, "two values of rope_theta"),
    ("eagle3", BOTH, drop("d2t"), LOAD, "its tokens mean nothing"),
    ("eagle3", BOTH, drop("fc.weight"), LOAD, "the tensor fc.weight [48, 144] is missing"),
    ("eagle3", BOTH, turn(O_PROJ), LOGP, f"the tensor {O_PROJ} is transposed"),
    ("eagle3", BOTH, put("rms_norm_eps", 0.5), LOGP, FRESH("rms_norm_eps: 0.5", 1e-6)),
    ("eagle3", "vllm", put("logit_scale", 0.25), LOGP, FRESH("logit_scale: 0.25", None)),
    ("eagle3", "sglang", put("final_logit_softcapping", 1.0), LOGP,
     FRESH("final_logit_softcapping: 1.0", None)),
    ("dflash", "vllm", put("logit_scale", 0.25), LOGP, FRESH("logit_scale: 0.25", None)),
    ("dflash", BOTH, put(BLOCK, [2, 5]), LAYERS, HIGH),
    ("dflash", BOTH, put(BLOCK, [0, 3]), LAYERS, LOW),
    ("dflash", BOTH, put("dflash_config.mask_token_id", 100), LOGP, "mask token " + OTHERWISE(100, 258)),
    ("dflash", BOTH, put("dflash_config.mask_token_id", 9999), "config",
     "mask token " + OTHERWISE(9999, 258)),
    ("dflash", BOTH, theta, LOGP, "the draft was trained with 10000.0"),
    ("dflash", BOTH, put("is_causal", True), LOGP, "trained with is_causal: false"),
    ("dflash", BOTH, put("dflash_config.block_size", 4), "block size", "block size " + OTHERWISE(4, 5)),
    ("dflash", BOTH, drop("layers.1.self_attn.k_norm.weight"), LOAD, "is missing"),
    ("dflash2", BOTH, put("dflash_config.selector_top_k", 3), LOGP, "selector_top_k " + OTHERWISE(3, 40)),
    ("dflash2", BOTH, exchange("predecessor", "successor"), LOGP, "two codebooks are exchanged"),
    ("dflash2", BOTH, drop("layers.1.mlp_conv.base_kernel"), LOAD, "base_kernel [2, 2, 48] is missing"),
    ("domino", "sglang", put(BLOCK, [2, 5]), LAYERS, HIGH),
    ("domino", "sglang", drop(GRU), LOAD, f"{GRU} [60, 20] is missing: sglang refuses the draft"),
    ("domino", "sglang", put("dflash_config.shift_label", False), LOGP,
     "shift_label " + OTHERWISE(False, True)),
    ("domino", "sglang", put("dflash_config.projector_type", "causal_v5"), LOAD,
     "sglang knows this head as 'domino' only"),
    ("peagle", "vllm", put("pard_token", 100), LOGP, "mask token " + OTHERWISE(100, 258)),
    ("peagle", "vllm", drop("mask_hidden"), LOAD, "mask_hidden [1, 1, 144] is missing"),
    ("peagle", "vllm", put("parallel_drafting", False), LOAD, "one token after the other"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "servers", "edit", "check", "why"), MUTATIONS)
def test_a_mistake_is_found_and_explained(
    algorithm: str, servers: str, edit: Edit, check: str, why: str, exported: Any, judge: Any
) -> None:
    damaged = exported(algorithm)
    damaged.change(edit)
    noticed = {server: found for server, found in judge(damaged).items() if found is not None}
    assert list(noticed) == servers.split()
    for found in noticed.values():
        assert found.check == check
        assert why in f"{found.what}\n{found.cause}"


def test_ids_for_offsets_are_explained_where_they_pass_for_offsets(exported: Any) -> None:
    damaged = exported("eagle3", draft_vocab_size=5)
    damaged.change(absolute)
    for verdict in damaged.verify(status=1):
        assert verdict["divergence"]["check"] == LOGP
        assert verdict["divergence"]["cause"].startswith("d2t holds token ids")


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


def test_the_report_is_in_plain_words(exported: Any) -> None:
    damaged = exported("eagle3")
    damaged.change(put(OURS, [2, 4, 5]))
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
    assert (sglang["agrees"], sglang["notes"]) == (True, ["the server leaves unread: d2t"])
    assert vllm["divergence"]["check"] == "loading"
    assert "has no place for: d2t" in vllm["divergence"]["what"]


BY_FACTOR = 0.1 * math.log(40) + 1


@pytest.mark.parametrize(
    ("fields", "sglang", "vllm"),
    [
        ({}, BY_FACTOR, BY_FACTOR),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
        ({"mscale": 1.0}, BY_FACTOR, BY_FACTOR),
        ({"attn_factor": 0.5}, 0.5 * BY_FACTOR, BY_FACTOR),
        ({"attention_factor": 0.5}, BY_FACTOR, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 2.0}, 2.0, 1.0),
    ],
)
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
    alone = replace(run, folder=shutil.copytree(run.folder, tmp_path / "moved"))
    (checkpoint,) = (run.run / "checkpoints").glob("step-*")
    alone.verify("--run", checkpoint, status=0)
    file = run.run.parent / "train.jsonl"
    (verdict, _) = alone.verify("--run", run.run, "--prompts", file, status=0)
    assert verdict["rounds"] == 12
    result = alone.ask()
    assert result.exit_code == 2
    assert "give the run's folder, or the checkpoint's, with --run" in result.output


def test_another_target_template_step_or_server_is_refused_or_found(
    exported: Any, tmp_path: Path
) -> None:
    run = exported("dflash")
    target = shutil.copytree(run.target, tmp_path / "target")
    template = target / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_end|>"))
    (verdict, _) = run.verify("--target", target, status=1)
    assert verdict["divergence"]["check"] == "chat template"
    assert "the template was changed after training" in verdict["divergence"]["cause"]
    other = tiny_target(tmp_path / "other", seed=1, std=0.5, num_hidden_layers=8)
    file = (stale := exported("eagle3")).folder / "draftcore.json"
    write_sealed(file, {**read_sealed(file), "step": 3})
    for export, arguments, says in (
        (run, ("--target", other), "was trained otherwise"),
        (stale, ("--run", stale.run), "is of step 3"),
        (exported("domino"), ("--server", "vllm"), "this draft can be read as: sglang"),
    ):
        result = export.ask(*arguments)
        assert (result.exit_code, says in result.output) == (2, True)
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


def test_a_fresh_export_is_written_in_the_layout_that_servers_load(
    exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other layouts of the algorithm are called."""
    more = f"{eagle3.CAPABILITIES} layout:archive"
    monkeypatch.setattr(eagle3, "CAPABILITIES", more)
    changed = exported("eagle3")
    changed.change(lambda _, tensors: tensors["fc.weight"].mul_(1.5))
    for verdict in changed.verify(status=1):
        assert "the tensor fc.weight is not the checkpoint's" in verdict["divergence"]["cause"]
    monkeypatch.setattr(eagle3, "CAPABILITIES", more.replace("layout:serving", "layout:other"))
    assert "offers the layouts archive, other" in changed.ask().output
