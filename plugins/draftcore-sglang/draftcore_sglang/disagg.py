"""Let a draftcore algorithm take over requests on a sglang decode server.

sglang calls `register` in each of its processes. It reads one variable of the launch,
DRAFTCORE_SGLANG_ALGORITHM, the name of an installed algorithm, whose capability says how sglang
runs it:

    sglang:EAGLE3           as one of sglang's own; only the first draft input is ours
    sglang:MODULE:CLASS     by this worker; sglang knows it by the algorithm's name in capitals

A refusal is a SystemExit: sglang logs any other exception of a plugin and starts without it, and an
operator who asked for an algorithm must not get another in silence. What a prefill server sent raises
nothing out of `take_over`, as that would end the scheduler, and with it the server: the request that
lacks something is aborted with the reason.

`rows` has what is the same for every serving engine; `internals.disagg` has what is sglang's.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection
from typing import Any

from torch import Tensor

from draftcore import bind, load_plugins
from draftcore.errors import UsageError
from draftcore_sglang.internals import disagg as internals
from draftcore_sglang.internals.signatures import require_sglang
from draftcore_sglang.rows import (
    Algorithm,
    Arrivals,
    DraftShape,
    HandedOver,
    RowError,
    RowField,
    first_draft_input,
    neutral_row,
    require,
    wire_row,
)

VARIABLE = "DRAFTCORE_SGLANG_ALGORITHM"
PREFIX = "sglang:"
# What sglang's requests call the fields of a row.
FIELDS = {"hidden": "hidden_states_tensor", "topk_p": "output_topk_p"}
FIELDS["topk_index"] = "output_topk_index"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the algorithm that the launch names, if it names one. Exits if it cannot be used."""
    if name := os.environ.get(VARIABLE):
        try:
            serve(bind(load_plugins(), "algorithm", name))
        except UsageError as error:
            raise SystemExit(f"{VARIABLE}={name}: {error}") from None


def serve(algorithm: Algorithm) -> str:
    """Make sglang ask this algorithm for first draft inputs; return sglang's name for it.

    Raises UsageError for an algorithm that cannot take over requests, or that sglang cannot run,
    and for an sglang that was not tested.
    """
    require_sglang(internals.SIGNATURES)
    require(algorithm)
    build = functools.partial(take_over, algorithm)
    served = served_as(algorithm)
    if ":" not in served:
        internals.take_over_builtin(served, build)
        return served
    if row := wire_row(algorithm, DraftShape(1, "float32")):
        raise UsageError(
            f"{algorithm.offer.name!r} needs {', '.join(field.name for field in row)} of each request\n"
            "  sglang's prefill server sends these for its own EAGLE family only\n"
            f"  declare {PREFIX}EAGLE3 if the draft is served as one, or start from the last token"
        )
    name = algorithm.offer.name.upper()
    internals.add_algorithm(name, served, build)
    return name


def served_as(algorithm: Algorithm) -> str:
    """Return how sglang runs an algorithm: as one of its own, or by a worker module:Class.

    Raises UsageError where its capabilities do not say, or say two ways.
    """
    offer, known = algorithm.offer, internals.builtin_algorithms()
    ways = sorted(name for name in offer.capabilities if name.startswith(PREFIX))
    served = ways[0].removeprefix(PREFIX) if len(ways) == 1 else ""
    if ":" in served or served in known:
        return served
    raise UsageError(
        f"sglang cannot run the algorithm {offer.name!r}\n"
        f"  it declares {', '.join(ways) or f'no capability {PREFIX}...'}\n"
        f"  declare one: {PREFIX}MODULE:CLASS of a worker, or {PREFIX} with one of "
        f"{', '.join(known)}"
    )


def take_over(algorithm: Algorithm, batch: Any, last_tokens_tensor: Tensor, future_map: Any) -> Any:
    """Answer sglang: the first draft input of a batch that a prefill server has computed.

    A request whose row cannot be used is aborted with the reason, and the others go on.
    """
    shape = internals.served_shape(batch.spec_algorithm)
    row = wire_row(algorithm, shape)

    def attempt(aborted: Collection[str]) -> Any:
        return first_draft_input(
            algorithm,
            arrivals(batch, row, aborted),
            last_tokens_tensor,
            future_map,
            shape,
            lambda found: internals.draft_input(found, batch),
            internals.relayed,
        )

    try:
        return attempt(())
    except RowError as error:
        for request in batch.reqs:
            if lacks := error.problems.get(request.rid):
                reason = str(RowError(algorithm.offer.name, {request.rid: lacks}))
                logger.error("%s", reason)
                internals.abort(request, reason)
        return attempt(error.problems)


def arrivals(batch: Any, row: tuple[RowField, ...], aborted: Collection[str] = ()) -> Arrivals:
    """Read sglang's batch; a request that ends now, or that nobody prefilled, gets a neutral row."""

    def handed(request: Any) -> HandedOver:
        if not row or request.rid in aborted or not internals.was_sent(request):
            return HandedOver(request.rid, neutral_row(row))
        sent: dict[str, Tensor | None] = {
            field.name: getattr(request, FIELDS[field.name]) for field in row
        }
        return HandedOver(request.rid, sent)

    requests = [handed(request) for request in batch.reqs]
    return Arrivals(requests, batch.req_pool_indices, batch.seq_lens, batch.enable_overlap)
