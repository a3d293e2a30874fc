"""`draftcore plan`: what a run takes, before it starts and without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftcore_sdk.targets import conversations, tiny_target
from draftcore_tools.api import plan
from draftcore_tools.memory import ADAMW, Storages, step_memory, zero_sample

from draftcore import open_run
from draftcore.contracts.algorithm import DataSummary, StepContext
from draftcore.training.loop import collate

QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16",
    "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A run on a target of 8B parameters, of which there is a config and a tokenizer alone."""
    target = tiny_target(tmp_path / "target")
    (target / "model.safetensors").unlink()
    config = {**json.loads((target / "config.json").read_text()), **QWEN3_8B, "layer_types": None}
    (target / "config.json").write_text(json.dumps(config))
    answers = ["yes"] * 12 + ["a red sky over a blue sea " * 56] * 4
    run = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"train": str(conversations(tmp_path / "train.jsonl", answers))},
        "algorithm": {"name": "eagle3", "options": {"draft_vocab_size": 32000}},
        "store": f"file:{tmp_path / 'features'}",
        "train": {"batch": 4, "epochs": 3},
    }
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return file


def test_a_run_on_an_8b_target_is_planned_from_a_config_alone_and_said_how_it_fits(
    big: Path, cli: Any
) -> None:
    sizes = "train.batch=8", "train.precision=fp32"
    planned = json.loads(cli("plan", big, "--device", "rtx5090", "--json", *sizes).stdout)
    memory = planned["memory"]
    assert (planned["rows"], planned["steps"], planned["fits"]) == (16, 6, False)
    assert planned["store_bytes"] == planned["tokens"] * 4 * 4096 * 2
    assert memory["target"] == 8_190_735_360 * 2
    draft = memory["drafts"][""]
    assert 6.5 < draft["held"] / 2**30 < 7  # 0.4 G parameters of 12 bytes, embedding and head
    assert memory["together"] == pytest.approx(memory["target"] + draft["peak"], rel=0.05)
    settings = [setting for setting, _ in planned["lower"]]
    assert settings[:2] == ["train.precision=bf16", "train.batch=4"]
    needs = [need for _, need in planned["lower"]]
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] <= planned["device_bytes"] < needs[-2]
    assert planned["hours"]["capture"] > 0 < planned["hours"]["training"]
    said = cli("plan", big, "--device", "h1000")
    assert (said.exit_code, "did you mean 'h100'" in said.output) == (2, True)


def test_a_dry_run_says_what_the_plan_does_of_some_rows_as_of_all(big: Path, cli: Any) -> None:
    """Those of --rows are rendered aside, and trains nothing."""
    some = json.loads(cli("plan", big, "--rows", "8", "--device", "h200", "--json").stdout)
    assert (some["rows"], some["sampled"], some["steps"]) == (16, 8, 12)
    told = plan(yaml.safe_load(big.read_text()), device="h200", rows=8)  # as a program is told
    assert told.to_json()["memory"] == some["memory"]
    assert not (big.parent / "run").exists()
    even = ("--device", "rtx5090", "train.batch=16", "train.batch_tokens=4000")
    planned = json.loads(cli("plan", big, *even, "--json").stdout)
    assert (planned["steps"], planned["lower"][0][0]) == (9, "train.batch_tokens=2000")
    said = cli("train", big, "--dry-run")
    assert said.exit_code == 0, said.output
    assert "12 in 3 epochs" in said.output
    assert "train.batch_tokens, with a higher" in " ".join(said.output.split())
    assert "in a step, of which" in said.output
    assert {path.name for path in big.parent.glob("run/*")} == {"data"}


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_the_memory_of_a_step_is_what_a_real_one_takes(
    write_run: Any, tmp_path: Path, algorithm: str
) -> None:
    """Of a small draft in bf16 on a CPU, whose storages are counted while it is computed."""
    file = write_run(tmp_path, ["yes"], {algorithm: {}}, precision="bf16")
    masks = [torch.arange(length) > 9 for length in (160, 90)]
    with open_run(file) as run, Storages() as storages:
        (draft,), storages.real = run.drafts, 1 << 60  # nothing is fake
        hook, asked = draft.algorithm.hook, {"options": draft.options}
        request = hook.feature_request(target=run.target, **asked)
        summary = DataSummary("", 2, 250, 230, 160, {})
        built = hook.build_draft(target=run.target, data=summary, **asked)
        kept = [*built.module.parameters(), *built.module.buffers()]
        for storage in (x.untyped_storage() for x in kept):
            storages.sizes[storage] = storage.nbytes()
        storages.peak = 0
        samples = [zero_sample(request, run.width, mask) for mask in masks]
        batch = collate(draft, request, samples, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            context = StepContext(1, 2, 0)
            output = hook.forward_loss(draft=built, batch=batch, context=context, **asked)
        output.numerator.backward()
        trained = sum(p.numel() for p in built.module.parameters())
    held, peak = step_memory(draft, masks)
    assert held == pytest.approx(
        sum(x.untyped_storage().nbytes() for x in kept) + ADAMW * trained, rel=0.02
    )
    assert peak == pytest.approx(storages.peak + ADAMW * trained, rel=0.05)
