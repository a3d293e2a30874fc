"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence
from typing import Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {"init": "fresh", "chain": "rerun", "steps": 2, "beta": 1.0, "num_drafts": 4}
CAPABILITIES = "compile cross_entropy disagg layout:serving served:sglang served:vllm "
CAPABILITIES += "sglang:EAGLE vllm:mtp"
# Few targets bring such a layer, and of those that do servers load it for some.
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SHAPE = {
    "family": "qwen3_5", "layer_types": ["full_attention"] * 12, "rope_parameters": HALF,
    "seed": 2,  # its answers begin alike, and none ends early
}  # fmt: skip
# By `check-plugin`, where nobody says otherwise.
TRIED_WITH: dict[str, Any] = {"algorithm mtp": {"options": {"init": "fresh"}, "shape": SHAPE}}


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_mtp.options:MtpOptions"
    implementation = "draftcore_mtp.algorithm:Mtp"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "mtp", capabilities, options, implementation, examples=examples)]
