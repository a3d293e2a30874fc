"""Take over requests that another server has prefilled: the first draft input of the decode side.

Beside the KV cache a prefill server sends one *row* per request, of fixed columns. An algorithm
says which fields of a row it needs (`disagg_row`) and makes its input of them
(`build_disagg_draft_input`). The rest is done here, once for all algorithms: rows are checked, what a
request lacks is named with the request, and the server's relay is written to only when the input is
there. A wrong row costs one request its answer, never a wrong token: drafts are verified.

Nothing of the serving engine is imported here, so the conformance suites run this without one. The
engine's side (`disagg`) passes `Arrivals`, a converter to the engine's own structure, and the relay.

Shape letters: B requests, H width of the draft's state, K proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import DisaggBatch, DraftInput
from draftcore.errors import DraftcoreError, UsageError

T = TypeVar("T")
WIRE_COLUMNS = 16  # of `topk_p` and `topk_index`; `hidden` is as wide as the draft's state

# ---------------------------------------------------------------- what goes in and out


@dataclass(frozen=True)
class DraftShape:
    """What the widths of a row depend on: the draft as it is served, never the target.

    `hidden_size` and `dtype` are those of the state that the draft hands from step to step.
    `layers` is 1 unless every step has a draft layer of its own, which proposes its own `topk`.
    """

    hidden_size: int
    dtype: str
    topk: int = 1
    layers: int = 1

    @property
    def proposals(self) -> int:
        return self.topk * self.layers


@dataclass(frozen=True)
class RowField:
    """One field of a row: `width` columns on the wire, the first `needed` of which are filled."""

    name: str
    width: int
    dtype: str
    needed: int


@dataclass(frozen=True)
class HandedOver:
    """One request as it arrived; `row` has a tensor [columns] for each field, None if not sent."""

    rid: str
    row: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Arrivals:
    """The requests of one batch, with their slots in the relay and their lengths, both int64 [B].

    With `overlap` the next step reads the relay and not the answer, so both are written to it.
    """

    requests: Sequence[HandedOver]
    slots_B: Tensor
    seq_lens_B: Tensor
    overlap: bool


class Relay(Protocol):
    """The server's map from slots to what the next step reads: sglang's `future_map`."""

    def publish(self, slots_B: Tensor, seq_lens_B: Tensor) -> object: ...
    def stash(self, slots_B: Tensor, made: Any) -> object: ...


class Algorithm(Protocol):
    """An algorithm that can be called, such as a `Binding`."""

    @property
    def hook(self) -> Specs: ...
    @property
    def offer(self) -> Offer: ...
    @property
    def options(self) -> Any: ...


class RowError(UsageError):
    """Requests whose rows cannot be used: `problems` says why, by request id."""

    def __init__(self, algorithm: str, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = problems
        lines = [f"  request {rid!r}: {lack}" for rid, lacks in problems.items() for lack in lacks]
        super().__init__(
            "\n".join([f"{algorithm} cannot take over {len(problems)} of the requests", *lines])
            + "\n  start the prefill server with the same algorithm, draft, top-k and steps"
        )


# ---------------------------------------------------------------- the algorithm's side


def require(algorithm: Algorithm) -> None:
    """Refuse an algorithm that cannot take requests over. Raises UsageError."""
    offer = algorithm.offer
    if not offer.capabilities & {"disagg", "disagg-stateless"}:
        raise UsageError(
            f"the algorithm {offer.name!r} cannot take over requests from a prefill server\n"
            "  it declares neither disagg nor disagg-stateless; it declares: "
            f"{', '.join(sorted(offer.capabilities)) or 'nothing'}\n"
            "  declare disagg-stateless if the last token is enough to start drafting from,\n"
            "  else disagg, with the hook build_disagg_draft_input"
        )


def wire_row(algorithm: Algorithm, shape: DraftShape) -> tuple[RowField, ...]:
    """Return what a prefill server must send of each request beside its last token.

    Raises UsageError for more proposals than the wire carries, and for a row that cannot be sent.
    """
    require(algorithm)
    parts: tuple[str, ...] = ()
    if "disagg" in algorithm.offer.capabilities:
        parts = tuple(algorithm.hook.disagg_row(options=algorithm.options) or ())
    width, proposals = shape.hidden_size, shape.proposals
    fields = {
        "hidden": (RowField("hidden", width, shape.dtype, width),),
        "topk": (
            RowField("topk_p", WIRE_COLUMNS, "float32", proposals),
            RowField("topk_index", WIRE_COLUMNS, "int64", proposals),
        ),
    }
    if len(set(parts)) < len(parts) or not fields.keys() >= set(parts):
        raise UsageError(
            f"the row of {algorithm.offer.name!r} is not one that the wire has: {parts}\n"
            "  return 'hidden', 'topk', both, or nothing"
        )
    if "topk" in parts and proposals > WIRE_COLUMNS:
        raise UsageError(
            f"the row of {algorithm.offer.name!r} needs {proposals} columns of topk_p, the wire "
            f"has {WIRE_COLUMNS}\n  top-k {shape.topk} times {shape.layers} layers is "
            f"{proposals}\n  lower the draft's top-k or its number of steps"
        )
    return tuple(field for part in parts for field in fields[part])


# ---------------------------------------------------------------- taking over


def first_draft_input(
    algorithm: Algorithm, arrivals: Arrivals, last_tokens_B: Tensor, future_map: Relay,
    shape: DraftShape, convert: Callable[[DraftInput], T],
    relayed: Callable[[T], Any] = lambda made: made,
) -> T:  # fmt: skip
    """Return the first draft input of a batch, as `convert` makes it of the algorithm's.

    With overlap the lengths are published and what is `relayed` of the input is stashed, in this order,
    after all that can fail; an empty batch has nothing to relay. Raises RowError, naming every request
    and field that is wrong, and UsageError for an algorithm that cannot do this.
    """
    row = wire_row(algorithm, shape)
    batch = check_rows(algorithm, arrivals, row)
    if "disagg" in algorithm.offer.capabilities:
        found = algorithm.hook.build_disagg_draft_input(
            batch=batch, last_tokens=last_tokens_B, future_map=future_map, options=algorithm.options
        )
    else:
        none = last_tokens_B.new_zeros(len(last_tokens_B), 0)
        found = DraftInput(none.float(), none.float(), none.long(), last_tokens_B)
    _check_answer(found, len(batch.rids), algorithm.offer.name)
    made = convert(found)
    if arrivals.overlap and batch.rids:
        future_map.publish(arrivals.slots_B, arrivals.seq_lens_B)
        future_map.stash(arrivals.slots_B, relayed(made))
    return made


def check_rows(algorithm: Algorithm, arrivals: Arrivals, row: Sequence[RowField]) -> DisaggBatch:
    """Check and stack what arrived. Raises RowError, naming every request and field that is wrong."""
    problems = {
        request.rid: lacks
        for request in arrivals.requests
        if (lacks := [lack for field in row if (lack := _lack(field, request.row.get(field.name)))])
    }
    if problems:
        raise RowError(algorithm.offer.name, problems)
    device, fields = arrivals.seq_lens_B.device, {field.name: field for field in row}

    def stacked(name: str, dtype: torch.dtype) -> Tensor:
        field = fields.get(name)
        if field is None or not arrivals.requests:
            return torch.zeros(len(arrivals.requests), field.needed if field else 0, dtype=dtype)
        rows = [request.row[name] for request in arrivals.requests]
        return torch.stack([values[: field.needed] for values in rows if values is not None])

    state = getattr(torch, fields["hidden"].dtype) if "hidden" in fields else torch.float32
    return DisaggBatch(
        rids=tuple(request.rid for request in arrivals.requests),
        seq_lens_B=arrivals.seq_lens_B,
        hidden_BH=stacked("hidden", state).to(device),
        topk_p_BK=stacked("topk_p", torch.float32).to(device),
        topk_index_BK=stacked("topk_index", torch.int64).to(device),
    )


def _lack(field: RowField, values: Tensor | None) -> str:
    """Say what is wrong with one field of one row, '' if nothing is."""
    needed = f"needed: {field.needed} of {field.dtype}"
    if values is None:
        return f"{field.name} was not sent; {needed}"
    if values.ndim != 1 or not field.needed <= len(values) <= field.width:
        return f"{field.name} has the shape {list(values.shape)}; {needed}"
    if str(values.dtype) != f"torch.{field.dtype}":
        return f"{field.name} is {str(values.dtype).removeprefix('torch.')}; {needed}"
    values = values[: field.needed]
    if not values.isfinite().all():
        return f"{field.name} is not finite"
    if field.name != "hidden" and (values < 0).any():
        return f"{field.name} has negative values"
    # The wire's buffers begin as zeros, and no best proposal has probability 0.
    if field.name == "topk_p" and not values.any():
        return f"{field.name} was not sent, its columns are zero; {needed}"
    return ""


def neutral_row(row: Sequence[RowField]) -> dict[str, Tensor | None]:
    """Return a row that passes the checks, for a request without a draft's state."""
    filled: dict[str, Tensor | None] = {}
    for field in row:
        values = torch.zeros(field.needed, dtype=getattr(torch, field.dtype))
        filled[field.name] = values + 1 if field.name == "topk_p" else values
    return filled


def _check_answer(found: Any, size: int, name: str) -> None:
    """Refuse an answer that no server could use; pluggy gives None where a hook returns nothing."""
    if not isinstance(found, DraftInput):
        raise DraftcoreError(
            f"build_disagg_draft_input of {name!r} returned {type(found).__name__}\n"
            "  return a draftcore.contracts.serving.DraftInput, for an empty batch too"
        )
    p, index = found.topk_p_BK, found.topk_index_BK
    wrong = [
        f"  {label} is {_shown(tensor)}"
        for label, tensor, good in (
            ("hidden_BH", found.hidden_BH, found.hidden_BH.is_floating_point()),
            ("topk_p_BK", p, p.dtype == torch.float32 and p.shape == index.shape),
            ("topk_index_BK", index, index.dtype == torch.int64),
            ("last_tokens_B", found.last_tokens_B, found.last_tokens_B.dtype == torch.int64),
        )
        if not good or len(tensor) != size or tensor.ndim != 2 - (label == "last_tokens_B")
    ]
    if wrong:
        raise DraftcoreError(
            f"build_disagg_draft_input of {name!r} answered {size} requests with\n"
            + "\n".join(wrong)
            + f"\n  its docstring has the shapes and types; the first size must be {size}"
        )


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
