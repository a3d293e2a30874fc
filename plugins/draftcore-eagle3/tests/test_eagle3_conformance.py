"""EAGLE-3 passes the algorithm suite, as published and as EAGLE-3.1, and its plugin its own."""

from typing import Any, ClassVar

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_eagle3.plugin"


class TestEagle3(AlgorithmSuite):
    plugin = "draftcore_eagle3.plugin"
    options: ClassVar[dict[str, Any]] = {"ttt_length": 3, "draft_vocab_size": 200, "num_drafts": 3}


class TestEagle31(AlgorithmSuite):
    plugin = "draftcore_eagle3.plugin"
    options: ClassVar[dict[str, Any]] = {
        "ttt_length": 2,
        "num_drafts": 4,
        "fc_norm": True,
        "norm_output": True,
        "supervise": "predicted",
    }
