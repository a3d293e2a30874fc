"""Domino passes the algorithm suite, and its plugin its own."""

from typing import Any, ClassVar

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_domino.plugin"


class TestDomino(AlgorithmSuite):
    plugin = "draftcore_domino.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
        "gru_hidden_dim": 32, "emb_dim": 24,
    }  # fmt: skip
