"""An algorithm that does nothing: its hooks are there, and its worker proposes no token.

Beside the metadata of a dist of its own a server finds it as it finds any plugin. The hook prints
what it was called with.
"""

import json
from collections.abc import Sequence
from typing import Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import DisaggBatch, DraftInput


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("algorithm", "idle", frozenset({"disagg", "sglang:idle_worker:IdleWorker"}))]


feature_request, build_draft, collate, forward_loss = (hookimpl(lambda: None) for _ in range(4))


@hookimpl
def build_disagg_draft_input(batch: DisaggBatch, last_tokens: Any) -> DraftInput:
    called = {"lengths": batch.seq_lens_B.tolist(), "tokens": last_tokens.tolist()}
    print("CALLED", json.dumps(called), flush=True)
    return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)
