"""EAGLE-3 passes the algorithm suite, and its plugin its own."""

from typing import Any, ClassVar

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_eagle3.plugin"


class TestEagle3(AlgorithmSuite):
    plugin = "draftcore_eagle3.plugin"
    options: ClassVar[dict[str, Any]] = {"ttt_length": 3, "draft_vocab_size": 200, "num_drafts": 3}
