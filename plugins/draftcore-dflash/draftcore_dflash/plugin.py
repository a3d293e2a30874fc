"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9, "num_drafts": 3,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
    "loss_decay_gamma": None, "mask_token_id": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
}  # fmt: skip
CAPABILITIES = "compile cross_entropy disagg layout:serving parallel served:sglang served:vllm "
CAPABILITIES += "sglang:DFLASH vllm:dflash stop_gradient:lk_lambda stop_gradient:dpace "
# The losses whose weights come of the draft itself; of D-PACE, either factor alone as well.
CAPABILITIES += "stop_gradient:dpace_cumulative_confidence_only "
CAPABILITIES += "stop_gradient:dpace_continuation_value_only"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_dflash.options:DFlashOptions"
    implementation = "draftcore_dflash.algorithm:DFlash"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "dflash", capabilities, options, implementation, examples=examples)]
