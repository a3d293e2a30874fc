"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

CAPABILITIES = "compile cross_entropy disagg layout:serving parallel served:sglang served:vllm "
CAPABILITIES += "sglang:DFLASH vllm:dflash"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_dflash.options:DFlashOptions"
    implementation = "draftcore_dflash.algorithm:DFlash"
    return [Offer("algorithm", "dflash", frozenset(CAPABILITIES.split()), options, implementation)]
