"""An algorithm that does nothing: its hooks are there, and its worker proposes no token.

Copied beside the metadata of a dist of its own, so that a server finds it as it finds any plugin.
With DRAFTCORE_IDLE_LOG the hook writes down what it was called with.
"""

import json
import os

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

CAPABILITIES = {"disagg", "sglang:idle_worker:IdleWorker"}


@hookimpl
def describe():
    return [Offer("algorithm", "idle", frozenset(CAPABILITIES))]


@hookimpl
def feature_request(target, options): ...


@hookimpl
def build_draft(target, data, options): ...


@hookimpl
def collate(samples, options): ...


@hookimpl
def forward_loss(draft, batch, context): ...


@hookimpl
def build_disagg_draft_input(batch, last_tokens):
    from draftcore.contracts.serving import DraftInput

    if log := os.environ.get("DRAFTCORE_IDLE_LOG"):
        with open(log, "a") as file:
            called = {"lengths": batch.seq_lens_B.tolist(), "tokens": last_tokens.tolist()}
            file.write(json.dumps(called) + "\n")
    return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)
