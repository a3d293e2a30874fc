"""What this plugin offers; `algorithm` is imported when a run selects it."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

EXAMPLE = {
    "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9, "gru_hidden_dim": 32,
    "emb_dim": 24, "shift_label": False, "sliding_window": 6, "num_drafts": 3, "loss_decay_gamma": None,
    "lambda_start": 0.5, "lambda_ratio": 0.25,
}  # fmt: skip
# sglang runs Domino as DFLASH, by what the exported config says of its projector.
CAPABILITIES = "compile cross_entropy disagg layout:serving parallel served:sglang sglang:DFLASH"


@hookimpl
def describe() -> Sequence[Offer]:
    options = "draftcore_domino.options:DominoOptions"
    implementation = "draftcore_domino.algorithm:Domino"
    capabilities, examples = frozenset(CAPABILITIES.split()), [EXAMPLE]
    return [Offer("algorithm", "domino", capabilities, options, implementation, examples=examples)]
