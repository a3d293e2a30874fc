"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "num_layers": 2, "layers": [2, 5, 9], "block_size": 4, "num_anchors": 9, "markov_rank": 24,
    "confidence_head_with_markov": False, "confidence_threshold": 0.3, "sliding_window": 6,
    "num_drafts": 3, "loss_decay_gamma": None, "ce_weight": 0.5,
}  # fmt: skip
# What the confidence head learns depends on the draft and is held constant: `stop_gradient`.
CAPABILITIES = "compile disagg layout:serving parallel served:sglang served:vllm sglang:DSPARK "
CAPABILITIES += "stop_gradient vllm:dspark"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_dspark.options:DSparkOptions"
    implementation = "draftcore_dspark.algorithm:DSpark"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "dspark", capabilities, options, implementation, examples=examples)]
