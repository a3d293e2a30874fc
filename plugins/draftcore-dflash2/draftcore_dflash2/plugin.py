"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9, "num_drafts": 3,
    "sliding_window": 6, "is_causal": False, "conv_kernel_size": 3, "conv_group_size": 8,
    "selector_rank": 16, "selector_top_k": 12, "labels": "teacher", "missing": "replace",
    "selector_loss_alpha": 0.5, "selector_warmup": 0.0,
}  # fmt: skip
# sglang and vLLM run DFlash2 by DFlash's method: the architecture in config.json says which it is.
CAPABILITIES = "compile disagg layout:serving parallel served:sglang served:vllm sglang:DFLASH "
CAPABILITIES += "vllm:dflash stop_gradient:stop_gradient"  # by the option of that name


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_dflash2.options:DFlash2Options"
    implementation = "draftcore_dflash2.algorithm:DFlash2"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "dflash2", capabilities, options, implementation, examples=examples)]
