"""What tests of an algorithm's export share: to read one, to harm one, to ask its reader.

The suite of algorithms asks a reader (`read_export`) about one target. Which RoPEs targets have, and
whether the reader stands on legs of its own, is asked here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round, gaps
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary
from draftcore_sdk.suite import bound
from draftcore_sdk.targets import tiny_target

GONE = "gone"  # in place of a value: without the field
THETA = {"rope_theta": 7e5}
LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def yarn(theta: float, factor: float, **more: Any) -> dict[str, Any]:
    """YaRN of a target that was first trained on 4,096 positions."""
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **more}
    return rope | {"original_max_position_embeddings": 4096}


# Those of gpt-oss-20b and -120b, DeepSeek-V3 and Kimi-K2 are as in these targets' config.json.
ROPES: dict[str, dict[str, Any]] = {
    "default": {**THETA, "rope_type": "default"},
    "linear": {**THETA, "rope_type": "linear", "factor": 2.0},
    "partial": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "yarn": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "gpt-oss": yarn(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    "deepseek-v3": yarn(10000.0, 40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    "kimi-k2": yarn(50000.0, 32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    "two mscales": yarn(10000.0, 40, mscale=1.0, mscale_all_dim=0.5, attn_factor=3.0),
    "attention_factor": yarn(10000.0, 40, attention_factor=0.9),
}
LENGTH = 40  # of a prompt, beyond the lengths that these are scaled from

# ---------------------------------------------------------------- a folder


def config_of(folder: Path) -> dict[str, Any]:
    """The content of an export's config.json."""
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data


def change(folder: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """Edit config.json's content and the tensors of an export in place."""
    file, config = folder / "model.safetensors", config_of(folder)
    tensors = load_file(file)
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


def change_config(folder: Path, section: str = "", /, **fields: Any) -> None:
    """Set fields of config.json, or of one of its sections; GONE removes one."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        part = config[section] if section else config
        part.update(fields)
        for name in [name for name, value in fields.items() if value == GONE]:
            del part[name]

    change(folder, edit)


def change_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edit the tensors of an export in place."""
    change(folder, lambda _, tensors: edit(tensors))


# ---------------------------------------------------------------- a reader


def largest_gap(
    plugin: str, options: Mapping[str, Any], rope: str, server: str, folder: Path
) -> float:
    """How far a served draft is from the drafter's own log-probabilities, in nats.

    The draft has random weights and is for a target with this RoPE; both are written into `folder`.
    """
    own = bound(plugin, "algorithm", "", options)
    hooks, checked = own.hook, own.options
    path = tiny_target(folder / "target", num_hidden_layers=8, rope_parameters=ROPES[rope])
    target = TransformersTarget(str(path), device="cpu")
    nothing = DataSummary("", 0, 0, 0, 0, {})
    draft = hooks.build_draft(target=target, data=nothing, options=checked)
    torch.manual_seed(4)
    for parameter in draft.module.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    export = folder / "export"
    hooks.export_draft(draft=draft, folder=export, layout="serving", options=checked)
    served = hooks.read_export(folder=export, server=server, options=checked)

    host, generator = Host.of(target), torch.Generator().manual_seed(1)
    tokens_T = torch.randint(250, (LENGTH,), generator=generator)
    layers, last = served.captured(host), 99
    hidden = [torch.randn(LENGTH, host.hidden_size, generator=generator) for _ in layers]
    drafter = hooks.drafter(draft=draft, target=target.load_model(), options=checked)
    state = drafter.allocate(1, LENGTH + 4)
    features = {f"hidden.{k}": x[None] for k, x in zip(layers, hidden, strict=True)}
    lengths_1, last_1 = torch.tensor([LENGTH]), torch.tensor([last])
    drafter.prefill(state, tokens_T[None], lengths_1, features, last_1)
    drawn = drafter.propose(state, 1.0, generator)
    assert drawn.probs_BKV is not None
    at = Round(host, tokens_T, last, tuple(hidden), hidden[-1])
    return float(gaps(served, at, drawn.tokens_BK[0], drawn.probs_BKV[0]).max())


def imports_of_ours(module: Path) -> set[str]:
    """The modules of draftcore and its plugins that a file imports: what its mistakes may share."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {str(name) for name in imported if str(name).startswith("draftcore")}
