"""Runs through graphs on a CUDA device: `nox -s gpu`. The backends' own tests are beside them."""

import json

import pytest

gpu = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda")
BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
ALGORITHMS = {
    "eagle3": None,
    "dflash": {"name": "dflash", "options": BLOCKS},
    "domino": {"name": "domino", "options": {**BLOCKS, "gru_hidden_dim": 16, "emb_dim": 8}},
}


@gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_decoding_through_graphs_is_that_of_eager(tmp_path, new_project, algorithm):
    """Lossless, and with the same drafts accepted; fp32."""
    chosen = ALGORITHMS[algorithm]
    project = new_project(tmp_path, **({"algorithm": chosen} if chosen else {}))
    project.cli("train", *CUDA)
    found = {}
    for backend in ("eager", "full", "breakable"):
        told = project.cli("eval", *CUDA, f"graphs.decode.backend={backend}", "--json")
        found[backend] = json.loads(told.stdout)
        assert found[backend]["lossless"] is True
    lengths = {name: report["acceptance_length"] for name, report in found.items()}
    assert len(set(lengths.values())) == 1, lengths


@gpu
@pytest.mark.parametrize("backend", ["full", "breakable", "piecewise"])
def test_a_draft_trains_on_features_that_graphs_captured(project, backend):
    """And evaluates in training through graphs as well, while more is captured."""
    graphs = (f"graphs.prefill.backend={backend}", "graphs.decode.backend=full")
    evaluated = ("train.eval_every=3", "train.eval_prompts=2")
    project.cli("train", *CUDA, *graphs, *evaluated, "store=memory")
    assert len(project.losses()) == 6


@gpu
def test_eager_and_graphs_train_alike(tmp_path, new_project):
    """fp32; the two differ in how the mask is made, so in the last bits of a feature."""
    losses = {}
    for backend in ("eager", "full"):
        project = new_project(tmp_path / backend)
        project.cli("train", *CUDA, f"graphs.prefill.backend={backend}")
        losses[backend] = project.losses()
    assert losses["full"] == pytest.approx(losses["eager"], rel=1e-4)


def test_a_target_on_the_cpu_is_refused_by_the_rule_that_says_so(project):
    result = project.cli("train", "graphs.prefill.backend=full", ok=False)
    assert result.exit_code == 2
    assert "the rule 'device'" in result.output
