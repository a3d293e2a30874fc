"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {"init": "fresh", "chain": "rerun", "steps": 2, "beta": 1.0, "num_drafts": 4}
CAPABILITIES = "compile cross_entropy disagg layout:serving served:sglang served:vllm "
CAPABILITIES += "sglang:EAGLE vllm:mtp"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_mtp.options:MtpOptions"
    implementation = "draftcore_mtp.algorithm:Mtp"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "mtp", capabilities, options, implementation, examples=examples)]
