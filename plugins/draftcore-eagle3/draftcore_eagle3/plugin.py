"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

# Not `split_dependent`: the default loss is a ratio of sums; only the LK losses are not.
CAPABILITIES = (
    "compile disagg distils layout:serving served:sglang served:vllm sglang:EAGLE3 vllm:eagle3"
)


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_eagle3.options:Eagle3Options"
    implementation = "draftcore_eagle3.algorithm:Eagle3"
    return [Offer("algorithm", "eagle3", frozenset(CAPABILITIES.split()), options, implementation)]
