"""Taking requests over from a prefill server: rows are checked, and nothing is relayed too early.

That it works for an algorithm that is right, the suite of algorithms shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pluggy
import pytest
import torch
from draftcore_sdk.prefilled import SHAPE, Log, arrivals, last_tokens, request, take_over
from draftcore_sglang.rows import (
    Algorithm,
    DraftShape,
    HandedOver,
    RowError,
    RowField,
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
from draftcore.contracts.serving import DisaggBatch, DraftInput
from draftcore.errors import DraftcoreError, UsageError


def algorithm(plugin: object, *capabilities: str) -> Algorithm:
    manager = pluggy.PluginManager("draftcore")
    manager.add_hookspecs(Specs)
    manager.register(plugin)
    offer = Offer("algorithm", "mine", frozenset(capabilities))
    return cast(Algorithm, SimpleNamespace(hook=manager.hook, offer=offer, options=None))


class Stateful:
    """Goes on from a state and proposals; `answer` may replace what it returns."""

    def __init__(self, row: Sequence[str] | None = None, answer: Any = ...) -> None:
        self.row, self.answer, self.batches = row, answer, list[DisaggBatch]()

    @hookimpl
    def disagg_row(self) -> Sequence[str]:
        return ("hidden", "topk") if self.row is None else self.row

    @hookimpl
    def build_disagg_draft_input(self, batch: DisaggBatch, last_tokens: Tensor) -> Any:
        self.batches.append(batch)
        if self.answer is not ...:
            return self.answer
        return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)


def handed(rid: str, **changes: Tensor | None) -> HandedOver:
    full = request(rid, wire_row(algorithm(Stateful(), "disagg"), SHAPE))
    return HandedOver(rid, {**full.row, **changes})


def test_a_stateless_algorithm_gets_an_empty_typed_input_and_one_of_neither_kind_none() -> None:
    with pytest.raises(UsageError, match="it declares: compile, layout:plain\n  declare disagg-st"):
        require(algorithm(object(), "compile", "layout:plain"))
    log, stateless = Log(), algorithm(object(), "disagg-stateless")
    assert wire_row(stateless, SHAPE) == ()
    found = take_over(stateless, ["a", "b"], log)
    assert found.last_tokens_B.tolist() == last_tokens([handed("a"), handed("b")]).tolist()
    kinds = [(tensor.dtype, tensor.shape) for tensor in vars(found).values()][:3]
    assert kinds == [(dtype, (2, 0)) for dtype in (torch.float32, torch.float32, torch.int64)]
    assert [call[0] for call in log.calls] == ["publish", "stash"]
    assert len(take_over(stateless, []).last_tokens_B) == 0


def test_a_row_has_the_proposals_of_all_layers_and_no_more_than_the_wire_has() -> None:
    stateful = algorithm(Stateful(), "disagg")
    row = wire_row(stateful, DraftShape(4096, "bfloat16", topk=2, layers=8))
    assert row == (
        RowField("hidden", 4096, "bfloat16", 4096),
        RowField("topk_p", 16, "float32", 16),
        RowField("topk_index", 16, "int64", 16),
    )
    for topk, layers in ((17, 1), (3, 6), (1, 17)):
        needed = f"needs {topk * layers} columns of topk_p, the wire has 16\n.*\n  lower the draft"
        with pytest.raises(UsageError, match=needed):
            wire_row(stateful, replace(SHAPE, topk=topk, layers=layers))
    for other in (["states"], ["hidden", "hidden"], ["topk_p"]):  # that the wire does not have
        with pytest.raises(UsageError, match=r"is not one that the wire has.*\n  return 'hidden'"):
            wire_row(algorithm(Stateful(other), "disagg"), SHAPE)


def test_columns_past_those_that_are_needed_are_another_requests() -> None:
    stateful = Stateful()
    found = take_over(algorithm(stateful, "disagg"), ["a", "b"])
    full: Any = handed("b").row
    for name, tensor in (("topk_p", found.topk_p_BK), ("topk_index", found.topk_index_BK)):
        assert tensor.shape == (2, SHAPE.proposals)
        assert torch.equal(tensor[1], full[name][: SHAPE.proposals])
    (batch,) = stateful.batches
    assert (batch.rids, batch.seq_lens_B.tolist()) == (("a", "b"), [10, 11])


@pytest.mark.parametrize(
    ("field", "sent", "lack"),
    [
        ("hidden", None, "hidden was not sent; needed: 24 of float32"),
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
def test_what_is_wrong_with_rows_is_said_before_anything_is_done_with_them(
    field: str, sent: Tensor | None, lack: str
) -> None:
    requests = [handed("good"), handed("r-17", **{field: sent}), handed("r-18", topk_p=None)]
    log, stateful, batch = Log(), Stateful(), arrivals(requests)
    given = batch, last_tokens(requests), log, SHAPE, lambda _: _
    says = f"over 2 of the requests\n  request 'r-17': {lack}.*\n  request 'r-18'"
    with pytest.raises(RowError, match=says) as caught:
        first_draft_input(algorithm(stateful, "disagg"), *given)
    assert list(caught.value.problems) == ["r-17", "r-18"]
    assert (log.calls, stateful.batches) == ([], [])


def test_a_neutral_row_passes_the_checks_in_the_dtype_of_the_draft() -> None:
    stateful = algorithm(Stateful(), "disagg")
    for dtype, count in itertools.product(("float32", "bfloat16"), (0, 1)):
        row = wire_row(stateful, replace(SHAPE, dtype=dtype))
        requests = [HandedOver("x", neutral_row(row))] * count
        hidden_BH = check_rows(stateful, arrivals(requests), row).hidden_BH
        assert (hidden_BH.dtype, hidden_BH.shape) == (getattr(torch, dtype), (count, 24))


def test_the_engines_own_input_is_stashed_and_nothing_where_it_cannot_be_made() -> None:
    requests, stateful = [handed("a"), handed("b")], algorithm(Stateful(), "disagg")
    batch, tokens_B, log = arrivals(requests), last_tokens(requests), Log()
    with pytest.raises(ZeroDivisionError):
        first_draft_input(stateful, batch, tokens_B, log, SHAPE, lambda found: 1 / 0)
    assert log.calls == []
    made = first_draft_input(stateful, batch, tokens_B, log, SHAPE, lambda found: ("own", found))
    assert log.calls == [("publish", [3, 5], [10, 11]), ("stash", [3, 5], made)]
    assert made[0] == "own"


def answer(size: int, **changes: Tensor) -> DraftInput:
    tokens_B = torch.zeros(size, dtype=torch.int64)
    topk = torch.zeros(size, 6), tokens_B.expand(6, -1).T
    return replace(DraftInput(torch.zeros(size, 24), *topk, tokens_B), **changes)


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
