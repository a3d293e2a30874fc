"""Taking requests over from a prefill server: rows are checked, and nothing is relayed too early."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pluggy
import pytest
import torch
from draftcore_sdk.prefilled import SHAPE, Log, arrivals, last_tokens, request, take_over
from draftcore_sglang.rows import (
    HandedOver,
    RowError,
    check_rows,
    first_draft_input,
    neutral_row,
    require,
    wire_row,
)
from torch import Tensor

from draftcore import hookimpl
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import (
    WIRE_COLUMNS,
    DisaggBatch,
    DraftInput,
    DraftShape,
    RowField,
    hidden_field,
    topk_fields,
)
from draftcore.errors import DraftcoreError, UsageError


@dataclass(frozen=True)
class Algorithm:
    hook: Specs
    offer: Offer


def algorithm(plugin: object, *capabilities: str) -> Algorithm:
    manager = pluggy.PluginManager("draftcore")
    manager.add_hookspecs(Specs)
    manager.register(plugin)
    return Algorithm(cast(Specs, manager.hook), Offer("algorithm", "mine", frozenset(capabilities)))


class Stateful:
    """Goes on from a state and proposals; `answer` may replace what it returns."""

    def __init__(self, row: Sequence[RowField] | None = None, answer: Any = ...) -> None:
        self.row, self.answer, self.batches = row, answer, list[DisaggBatch]()

    @hookimpl
    def disagg_row(self, shape: DraftShape) -> Sequence[RowField]:
        return (hidden_field(shape), *topk_fields(shape)) if self.row is None else self.row

    @hookimpl
    def build_disagg_draft_input(self, batch: DisaggBatch, last_tokens: Tensor) -> Any:
        self.batches.append(batch)
        if self.answer is not ...:
            return self.answer
        return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)


class Silent:
    """Neither hook."""


def handed(rid: str, **changes: Tensor | None) -> HandedOver:
    full = request(rid, (hidden_field(SHAPE), *topk_fields(SHAPE)))
    return HandedOver(rid, {**full.row, **changes})


def refused(*requests: HandedOver) -> RowError:
    """Hand these over with overlap; nothing may have been relayed when they are refused."""
    log, stateful = Log(), Stateful()
    with pytest.raises(RowError) as caught:
        first_draft_input(
            algorithm(stateful, "disagg"),
            arrivals(requests),
            last_tokens(requests),
            log,
            SHAPE,
            lambda found: found,
        )
    assert log.calls == []
    assert stateful.batches == [], "the hook was called with rows that are wrong"
    return caught.value


# ------------------------------------------------------------ who can do this


def test_an_algorithm_of_neither_capability_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(UsageError) as caught:
        require(algorithm(Silent(), "compile", "layout:plain"))
    assert str(caught.value).splitlines() == [
        "the algorithm 'mine' cannot take over requests from a prefill server",
        "  it declares neither disagg nor disagg-stateless; it declares: compile, layout:plain",
        "  declare disagg-stateless if the last token is enough to start drafting from,",
        "  else disagg, with the hook build_disagg_draft_input",
    ]


def test_a_stateless_algorithm_gets_an_empty_typed_input() -> None:
    log, stateless = Log(), algorithm(Silent(), "disagg-stateless")
    assert wire_row(stateless, SHAPE) == ()
    found = take_over(stateless, ["a", "b"], log)
    assert found.last_tokens_B.tolist() == last_tokens([handed("a"), handed("b")]).tolist()
    kinds = [(tensor.dtype, tensor.shape) for tensor in vars(found).values()][:3]
    assert kinds == [(dtype, (2, 0)) for dtype in (torch.float32, torch.float32, torch.int64)]
    assert [call[0] for call in log.calls] == ["publish", "stash"]
    assert len(take_over(stateless, []).last_tokens_B) == 0


def test_an_algorithm_without_a_row_needs_only_the_token() -> None:
    class Bare:
        @hookimpl
        def build_disagg_draft_input(self, batch: DisaggBatch, last_tokens: Tensor) -> DraftInput:
            return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)

    found = take_over(algorithm(Bare(), "disagg"), ["a"])
    assert (found.hidden_BH.shape, found.topk_p_BK.shape) == ((1, 0), (1, 0))


# ------------------------------------------------------------ the row


def test_the_row_of_several_layers_has_their_proposals_one_after_another() -> None:
    row = wire_row(algorithm(Stateful(), "disagg"), DraftShape(4096, "bfloat16", topk=2, layers=3))
    assert row == (
        RowField("hidden", 4096, "bfloat16", 4096),
        RowField("topk_p", 16, "float32", 6),
        RowField("topk_index", 16, "int64", 6),
    )


@pytest.mark.parametrize(("topk", "layers"), [(16, 1), (4, 4), (1, 16)])
def test_as_many_proposals_as_the_wire_has_columns_travel(topk: int, layers: int) -> None:
    shape = replace(SHAPE, topk=topk, layers=layers)
    assert wire_row(algorithm(Stateful(), "disagg"), shape)[1].needed == WIRE_COLUMNS


@pytest.mark.parametrize(("topk", "layers"), [(17, 1), (3, 6), (1, 17)])
def test_more_proposals_than_the_wire_has_columns_are_refused(topk: int, layers: int) -> None:
    with pytest.raises(UsageError) as caught:
        wire_row(algorithm(Stateful(), "disagg"), replace(SHAPE, topk=topk, layers=layers))
    assert f"needs {topk * layers} columns of topk_p, the wire has 16" in str(caught.value)
    assert str(caught.value).endswith("lower the draft's top-k or its number of steps")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((RowField("hidden", 64, "float32", 64),), "the wire has 24 of float32"),
        ((RowField("hidden", 24, "float64", 24),), "the wire has 24 of float32"),
        ((RowField("hidden", 24, "float32", 0),), "has 0 of 24"),
        ((hidden_field(SHAPE), hidden_field(SHAPE)), "each once"),
        (topk_fields(SHAPE)[:1], "both topk_ or none"),
        ((RowField("states", 24, "float32", 24),), "there are hidden, topk_p, topk_index"),  # type: ignore[arg-type]
    ],
)
def test_a_row_that_the_wire_does_not_have_is_refused(row: Sequence[RowField], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        wire_row(algorithm(Stateful(row), "disagg"), SHAPE)


# ------------------------------------------------------------ what arrived


def test_columns_past_those_that_are_needed_are_another_requests() -> None:
    stateful = Stateful()
    found = take_over(algorithm(stateful, "disagg"), ["a", "b"])
    full = request("b", (hidden_field(SHAPE), *topk_fields(SHAPE))).row
    assert found.topk_p_BK.shape == found.topk_index_BK.shape == (2, SHAPE.proposals)
    for name, tensor in (("topk_p", found.topk_p_BK), ("topk_index", found.topk_index_BK)):
        sent = full[name]
        assert sent is not None
        assert torch.equal(tensor[1], sent[: SHAPE.proposals])
    (batch,) = stateful.batches
    assert (batch.rids, batch.seq_lens_B.tolist()) == (("a", "b"), [10, 11])


@pytest.mark.parametrize(
    ("field", "sent", "lack"),
    [
        ("hidden", None, "hidden was not sent; needed: 24 of float32"),
        ("topk_p", None, "topk_p was not sent; needed: 6 of float32"),
        ("topk_index", None, "topk_index was not sent; needed: 6 of int64"),
        ("hidden", torch.zeros(64), r"hidden has the shape \[64\]; needed: 24 of float32"),
        ("hidden", torch.zeros(1, 24), r"hidden has the shape \[1, 24\]"),
        ("topk_index", torch.zeros(5, dtype=torch.int64), r"topk_index has the shape \[5\]"),
        ("topk_p", torch.ones(17), r"topk_p has the shape \[17\]"),
        ("hidden", torch.zeros(24).half(), "hidden is float16; needed: 24 of float32"),
        ("topk_index", torch.zeros(16), "topk_index is float32; needed: 6 of int64"),
        ("hidden", torch.full((24,), torch.nan), "hidden is not finite"),
        ("topk_p", torch.full((16,), -0.5), "topk_p has negative values"),
        ("topk_index", torch.full((16,), -1), "topk_index has negative values"),
        ("topk_p", torch.zeros(16), "topk_p was not sent, its columns are zero"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_request_and_field(
    field: str, sent: Tensor | None, lack: str
) -> None:
    error = refused(handed("good"), handed("r-17", **{field: sent}))
    assert list(error.problems) == ["r-17"]
    assert re.search(f"request 'r-17': {lack}", str(error))


def test_every_wrong_request_is_named_at_once() -> None:
    error = refused(handed("a", hidden=None), handed("b"), handed("c", topk_p=None, hidden=None))
    assert {rid: len(lacks) for rid, lacks in error.problems.items()} == {"a": 1, "c": 2}
    assert "cannot take over 2 of the requests" in str(error)
    assert str(error).splitlines()[-1].startswith("  start the prefill server with the same")


def test_a_neutral_row_passes_the_checks() -> None:
    stateful = algorithm(Stateful(), "disagg")
    row = wire_row(stateful, SHAPE)
    batch = check_rows(stateful, arrivals([HandedOver("x", neutral_row(row))]), row)
    assert batch.hidden_BH.shape == (1, 24)


def test_rows_are_stacked_in_the_dtype_of_the_draft() -> None:
    shape, stateful = replace(SHAPE, dtype="bfloat16"), algorithm(Stateful(), "disagg")
    row = wire_row(stateful, shape)
    for requests in ([], [request("a", row)]):
        batch = check_rows(stateful, arrivals(requests), row)
        assert (batch.hidden_BH.dtype, len(batch.hidden_BH)) == (torch.bfloat16, len(requests))


def test_a_count_of_last_tokens_that_is_not_the_batchs_is_refused() -> None:
    with pytest.raises(DraftcoreError, match=r"int64 \[3\] last tokens for 2 requests"):
        first_draft_input(
            algorithm(Silent(), "disagg-stateless"),
            arrivals([handed("a"), handed("b")]),
            torch.zeros(3, dtype=torch.int64),
            Log(),
            SHAPE,
            lambda found: found,
        )


# ------------------------------------------------------------ the answer, and the relay


def test_what_was_converted_is_stashed_after_the_lengths_were_published() -> None:
    log, requests = Log(), [handed("a"), handed("b")]
    made = first_draft_input(
        algorithm(Stateful(), "disagg"),
        arrivals(requests),
        last_tokens(requests),
        log,
        SHAPE,
        lambda found: ("engine's own", found),
    )
    assert made[0] == "engine's own"
    assert log.calls == [("publish", [3, 5], [10, 11]), ("stash", [3, 5], made)]


def test_a_conversion_that_fails_leaves_the_relay_alone() -> None:
    log, requests = Log(), [handed("a")]
    batch, tokens_B = arrivals(requests), last_tokens(requests)
    with pytest.raises(ZeroDivisionError):
        first_draft_input(
            algorithm(Stateful(), "disagg"), batch, tokens_B, log, SHAPE, lambda found: 1 / 0
        )
    assert log.calls == []


def answer(size: int, **changes: Tensor) -> DraftInput:
    whole = DraftInput(
        torch.zeros(size, 24),
        torch.zeros(size, 6),
        torch.zeros(size, 6, dtype=torch.int64),
        torch.zeros(size, dtype=torch.int64),
    )
    return replace(whole, **changes)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "returned NoneType"),
        ({"hidden_BH": None}, "returned dict"),
        (answer(3), r"hidden_BH is float32 \[3, 24\]"),
        (answer(2, hidden_BH=torch.zeros(2, 24, dtype=torch.int64)), "hidden_BH is int64"),
        (answer(2, hidden_BH=torch.zeros(2, 1, 24)), r"hidden_BH is float32 \[2, 1, 24\]"),
        (answer(2, topk_p_BK=torch.zeros(2, 6).double()), "topk_p_BK is float64"),
        (answer(2, topk_p_BK=torch.zeros(2, 5)), r"topk_p_BK is float32 \[2, 5\]"),
        (answer(2, topk_index_BK=torch.zeros(2, 6).int()), "topk_index_BK is int32"),
        (answer(2, last_tokens_B=torch.zeros(2).int()), "last_tokens_B is int32"),
    ],
)
def test_an_answer_that_no_server_could_use_is_refused_before_anything_is_relayed(
    found: Any, reason: str
) -> None:
    log = Log()
    with pytest.raises(DraftcoreError, match=reason):
        take_over(algorithm(Stateful(answer=found), "disagg"), ["a", "b"], log)
    assert log.calls == []


def test_a_hook_may_read_the_relay_and_not_write_to_it() -> None:
    class Writer:
        @hookimpl
        def build_disagg_draft_input(self, last_tokens: Tensor, future_map: Any) -> DraftInput:
            assert future_map.calls == []
            future_map.stash(last_tokens, None)
            return answer(len(last_tokens))

    log = Log()
    with pytest.raises(DraftcoreError, match="may not stash\n  return the input"):
        take_over(algorithm(Writer(), "disagg"), ["a"], log)
    assert log.calls == []
