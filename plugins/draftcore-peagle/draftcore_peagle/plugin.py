"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "layers": [9, 0, 4], "num_layers": 3, "draft_vocab_size": 200, "fc_norm": True,
    "supervise": "predicted", "num_attention_heads": 6, "num_key_value_heads": 3, "num_depths": 3,
    "down_sample_ratio": 0.9, "max_anchors": 7, "train_head": False, "skip_unknown": False,
    "mask_token_id": 3, "num_drafts": 2,
}  # fmt: skip
# Neither `disagg` nor a capability of sglang: it does not draft in parallel.
CAPABILITIES = "compile distils layout:serving parallel served:vllm vllm:eagle3"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_peagle.options:PEagleOptions"
    implementation = "draftcore_peagle.algorithm:PEagle"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "peagle", capabilities, options, implementation, examples=examples)]
