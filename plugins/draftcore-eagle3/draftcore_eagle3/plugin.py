"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "num_layers": 2, "layers": [9, 0, 4], "draft_vocab_size": 200, "fc_norm": True, "norm_output": True,
    "supervise": "predicted", "num_attention_heads": 6, "num_key_value_heads": 3, "ttt_length": 3,
    "num_drafts": 4,
}  # fmt: skip
# The LK losses are means over the micro-batch, and one has a weight that is held constant.
CAPABILITIES = "compile disagg distils layout:serving served:sglang served:vllm "
CAPABILITIES += "sglang:EAGLE3 vllm:eagle3 "
CAPABILITIES += "split_dependent:lk_alpha split_dependent:lk_lambda stop_gradient:lk_lambda"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_eagle3.options:Eagle3Options"
    implementation = "draftcore_eagle3.algorithm:Eagle3"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "eagle3", capabilities, options, implementation, examples=examples)]
