"""The reader of exports: on its own legs, and right about every shape of RoPE and head."""

import ast
from pathlib import Path
from typing import Any

import draftcore_eagle3
import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.options import Eagle3Options

from draftcore.records import DataSummary
from draftcore.served import Host, Round, UnservableError, gaps
from draftcore.target import TargetSpec
from draftcore.testing.targets import tiny_target

PACKAGE = Path(draftcore_eagle3.__file__).parent
THETA = {"rope_theta": 7e5}
LLAMA3 = {
    **THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "default": {**THETA, "rope_type": "default"},
    "linear": {**THETA, "rope_type": "linear", "factor": 2.0},
    "partial": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "yarn": YARN,
}


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse((PACKAGE / "served.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {name for name in imported if str(name).startswith("draftcore")}
    assert ours == {"draftcore.served"}


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", num_hidden_layers=8, rope_parameters=ROPES[rope])
    spec = TargetSpec(str(target), device="cpu")
    options = Eagle3Options(num_attention_heads=6, num_key_value_heads=3, num_drafts=3)
    draft = plugin.build_draft(spec, DataSummary("", 0, 0, 0, 0, {}), options)
    torch.manual_seed(4)
    for parameter in draft.module.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    plugin.export_draft(draft, tmp_path / "export", "serving")
    served = plugin.read_export(tmp_path / "export", server)
    assert largest_gap(served, draft, spec, options) < 1e-3


def largest_gap(served: Any, draft: Any, spec: TargetSpec, options: Any) -> float:
    """The largest difference in log-probability from the drafter's own, in nats."""
    host = Host.of(spec)
    layers, length = served.captured(host), 40  # beyond the lengths that RoPEs are scaled from
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(250, (length,), generator=generator)
    hidden = [torch.randn(length, host.hidden_size, generator=generator) for _ in layers]
    drafter = plugin.drafter(draft, spec.model, options)
    state = drafter.allocate(1, length + 4)
    features = {f"hidden.{k}": x[None] for k, x in zip(layers, hidden, strict=True)}
    drafter.prefill(
        state, tokens_T[None], torch.tensor([length]), features, torch.tensor([99])
    )  # fmt: skip
    drawn_1K, probs_1KV = drafter.propose(state, 1.0, generator)
    at = Round(host, tokens_T, 99, tuple(hidden), hidden[-1])
    return float(gaps(served, at, drawn_1K[0], probs_1KV[0]).max())


def test_an_unknown_kind_of_draft_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3DraftModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnservableError, match="LlamaForCausalLMEagle3"):
        plugin.read_export(tmp_path, "sglang")
