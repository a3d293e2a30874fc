"""DSpark passes its suites; exports say what every server reads; a threshold wants a head."""

from typing import Any, ClassVar

from draftcore_sdk.algorithm_fixtures import ExportSuite, drop
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_dspark.plugin"


class TestDSpark(AlgorithmSuite):
    plugin = "draftcore_dspark.plugin"
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 4, "num_anchors": 9, "markov_rank": 24,
    }  # fmt: skip


W1, W2, JUDGE = (
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj",
)
HEADS = {W1: (270, 6), W2: (270, 6), f"{JUDGE}.weight": (1, 38), f"{JUDGE}.bias": (1,)}


class TestExports(ExportSuite):
    plugin, architecture = "draftcore_dspark.plugin", "Qwen3DSparkModel"
    kept: ClassVar = {"layers": (0, 2, 6), "markov_head_type": "rnn"}
    free: ClassVar = {"confidence_threshold": 0.5}
    against: ClassVar = {"markov_rank": 5, "markov_head_type": "gated"}
    refused_configs: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "the anchor's row is spare": ({"sample_from_anchor": False}, "sample_from_anchor: False"),
        "no rank": ({"markov_rank": GONE, "dflash_config.markov_rank": GONE}, "lacks 'markov_rank'"),
        "two ranks": ({"markov_rank": 8}, r"two values of markov_rank: 8 (.|\n)*6"),
        "another rank": (
            {"markov_rank": 8, "dflash_config.markov_rank": 8}, rf"{W1} is \[270, 6\], not \[270, 8",
        ),
        "another head": (
            {"markov_head_type": "lstm", "dflash_config.markov_head_type": "lstm"},
            r"'lstm'(.|\n)*vanilla, gated, rnn",
        ),
    }  # fmt: skip
    refused_tensors: ClassVar = {name: (drop(name), f"missing {name}") for name in HEADS}
    served: ClassVar = {
        "partial": ("partial", {}),
        "yarn, sliding": ("deepseek-v3", {"sliding_window": 6, "enable_confidence_head": False}),
    }
    reader_shares: ClassVar = frozenset({"draftcore_nn.served", "draftcore_dflash.served"})


class TestExportsOfOtherHeads(ExportSuite):
    """Those that sglang alone computes."""

    plugin, architecture, servers = "draftcore_dspark.plugin", "Qwen3DSparkModel", ("sglang",)
    served: ClassVar = {
        "gated": ("default", {"markov_head_type": "gated", "confidence_head_with_markov": False}),
        "rnn": ("default", {"markov_head_type": "rnn"}),
    }
    reader_shares: ClassVar = TestExports.reader_shares
