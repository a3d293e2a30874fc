"""DFlash passes the algorithm suite, and its plugin its own."""

from typing import Any, ClassVar

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_dflash.plugin"


class TestDFlash(AlgorithmSuite):
    plugin = "draftcore_dflash.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
    }  # fmt: skip
