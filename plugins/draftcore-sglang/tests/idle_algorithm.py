"""An algorithm that does nothing: its hooks are there, and its worker proposes no token.

Copied beside the metadata of a dist of its own, so that a server finds it as it finds any plugin.
With DRAFTCORE_IDLE_LOG the hook writes down what it was called with.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import DisaggBatch, DraftInput

CAPABILITIES = {"disagg", "sglang:idle_worker:IdleWorker"}


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("algorithm", "idle", frozenset(CAPABILITIES))]


@hookimpl
def feature_request(target: Any, options: Any) -> Any: ...


@hookimpl
def build_draft(target: Any, data: Any, options: Any) -> Any: ...


@hookimpl
def collate(samples: Any, options: Any) -> Any: ...


@hookimpl
def forward_loss(draft: Any, batch: Any, context: Any) -> Any: ...


@hookimpl
def build_disagg_draft_input(batch: DisaggBatch, last_tokens: Any) -> DraftInput:
    if log := os.environ.get("DRAFTCORE_IDLE_LOG"):
        with open(log, "a") as file:
            called = {"lengths": batch.seq_lens_B.tolist(), "tokens": last_tokens.tolist()}
            file.write(json.dumps(called) + "\n")
    return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)
