"""Target and draft run through graphs, from the command line, with every algorithm of ours.

The backend is the one that records on a CPU: what a graph would freeze, alias or refuse shows.
"""

from __future__ import annotations

import json

import pytest

ALGORITHMS = {
    "eagle3": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3},
    "dflash": {"layers": [1, 2, 4], "num_layers": 2, "block_size": 4, "num_anchors": 8},
    "domino": {
        "layers": [1, 2, 4],
        "num_layers": 2,
        "block_size": 4,
        "num_anchors": 8,
        "gru_hidden_dim": 16,
        "emb_dim": 8,
    },
}
DECODE = {"backend": "recording", "rows": [1, 2], "lengths": [256, 512]}
PREFILL = {"backend": "recording", "lengths": [64, 256]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_evaluating_through_graphs_is_lossless_and_accepts_the_same(tmp_path, new_project, name):
    project = new_project(tmp_path / name, algorithm={"name": name, "options": ALGORITHMS[name]})
    project.cli("train")
    eager = json.loads(project.cli("eval", "--json").stdout)
    project.config["graphs"] = {"decode": DECODE}
    project.__post_init__()
    graphs = json.loads(project.cli("eval", "--json").stdout)
    assert graphs["lossless"] is True
    keys = ("tokens", "rounds", "acceptance_by_position", "acceptance_length")
    assert {key: graphs[key] for key in keys} == {key: eager[key] for key in keys}
