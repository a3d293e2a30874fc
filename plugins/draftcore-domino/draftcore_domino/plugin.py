"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

# sglang runs Domino as DFLASH, by what the exported config says of its projector.
CAPABILITIES = "compile cross_entropy disagg layout:serving parallel served:sglang sglang:DFLASH"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_domino.options:DominoOptions"
    implementation = "draftcore_domino.algorithm:Domino"
    return [Offer("algorithm", "domino", frozenset(CAPABILITIES.split()), options, implementation)]
