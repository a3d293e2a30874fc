"""Capture from a server without this dist: states as text in the answer, slow and limited in size.

sglang 0.5.23 can return layers' outputs (`--enable-return-aux-hidden-states`), and then
returns nothing else; older ones, or without that flag, the last hidden state. A float takes some 20
bytes of text, so this is for a look at a server, not for a run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError
from draftcore_sglang.client import Server


def layers_of(server: Server, timeout: float) -> tuple[int, ...] | None:
    """Return the layers whose outputs a plain server returns; None for the last hidden state.

    Raises UsageError for a server that returns neither.
    """
    args = server.get("/server_info", timeout)
    if args.get("enable_return_aux_hidden_states") and args.get(
        "return_aux_hidden_state_layer_ids"
    ):
        # Explicit ids are 0-based outputs for each of sglang's conventions; answers are in the
        # model's order whatever the order of ids.
        return tuple(sorted(int(layer) for layer in args["return_aux_hidden_state_layer_ids"]))
    if args.get("enable_return_hidden_states") or args.get("return_hidden_states_mode") == "full":
        return None
    raise UsageError(
        f"sglang server {server.url} gives no receipt, and returns no states either\n"
        "  install draftcore-sglang beside it and set DRAFTCORE_SINK in its environment; its log "
        "says why if that is done"
    )


def require_served(server: Server, request: FeatureRequest, layers: tuple[int, ...] | None) -> None:
    """Raise UsageError for a request that a plain server cannot answer."""
    if layers is None and not request.layers:
        return
    if layers is not None and not request.last_hidden and set(request.layers) <= set(layers):
        return
    has = (
        "the last hidden state alone" if layers is None else f"layers {list(layers)} and no others"
    )
    raise UsageError(
        f"sglang server {server.url} does not run draftcore-sglang, and returns {has}\n"
        f"  asked for: {', '.join(request.names)}\n"
        "  install draftcore-sglang beside it and set DRAFTCORE_SINK in its environment"
    )


def read_states(
    answer: Any, request: FeatureRequest, layers: tuple[int, ...] | None, tokens: int
) -> dict[str, Tensor]:
    """Read an answer's states, [T, H] each; rows may be short, which the caller checks."""
    rows = answer["meta_info"]["hidden_states"][0]
    states = torch.tensor(rows, dtype=torch.float32).reshape(-1, len(rows[0]))[:tokens]
    dtype: torch.dtype = getattr(torch, request.dtype)
    if layers is None:
        return {"last_hidden": states.to(dtype)}
    parts = dict(zip(layers, states.chunk(len(layers), dim=-1), strict=True))
    return {f"hidden.{layer}": parts[layer].to(dtype) for layer in request.layers}
