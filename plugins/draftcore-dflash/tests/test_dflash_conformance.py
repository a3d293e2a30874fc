"""DFlash passes the algorithm suite, with full attention and with a window, and its plugin its own."""

from typing import Any, ClassVar

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite

# Nine anchors are all of a learned answer, and a choice in the suite's long sample.
SMALL: dict[str, Any] = {"num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9}


class TestPlugin(PluginSuite):
    plugin = "draftcore_dflash.plugin"


class TestDFlash(AlgorithmSuite):
    plugin = "draftcore_dflash.plugin"
    options: ClassVar[dict[str, Any]] = SMALL


class TestDFlashWithWindow(AlgorithmSuite):
    plugin = "draftcore_dflash.plugin"
    options: ClassVar[dict[str, Any]] = {
        **SMALL,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "num_drafts": 3,
    }
