"""That decode servers take over what prefill servers hand on, for an algorithm that claims `disagg`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from draftcore_graphs.states import tensors
from draftcore_sglang.rows import HandedOver, RowError, check_rows, first_draft_input, wire_row
from torch import Tensor

from draftcore.errors import DraftcoreError
from draftcore_sdk.drafting import LENGTHS, Told
from draftcore_sdk.prefilled import (
    ABORTED,
    SHAPE,
    SHAPES,
    Log,
    arrivals,
    last_tokens,
    request,
    take_over,
)
from draftcore_sdk.suite import Suite
from draftcore_sdk.workbench import Bench, contents, require_same_bits

OTHER_ROW = "the draft input is not what was sent: "


class HandingOver(Suite):
    """The part of `algorithms.AlgorithmSuite` that hands a draft over from prefill to decode."""

    def test_disagg_answers_an_empty_batch_with_an_empty_input(self, bench: Bench) -> None:
        bench.require("disagg")
        found = take_over(bench, [], log := Log())
        matrices = (found.hidden_BH, found.topk_p_BK, found.topk_index_BK)
        assert [len(tensor) for tensor in (*matrices, found.last_tokens_B)] == [0, 0, 0, 0]
        assert log.calls == []

    def test_disagg_leaves_what_it_is_given_alone(self, bench: Bench) -> None:
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        requests = [request(rid, row) for rid in ("a", "b")]
        batch, tokens_B = arrivals(requests), last_tokens(requests)
        first_draft_input(bench, batch, tokens_B, log := Log(), SHAPE, lambda found: found)
        assert not log.overwritten, f"future_map is for reading; it writes {log.overwritten}"
        assert torch.equal(tokens_B, last_tokens(requests)), "the last tokens were altered"
        lengths = arrivals(requests).seq_lens_B
        assert torch.equal(batch.seq_lens_B, lengths), "the lengths were altered"
        for one in requests:
            require_same_bits(contents(one.row), contents(request(one.rid, row).row))

    def test_disagg_gives_every_request_its_own_input(self, bench: Bench) -> None:
        """A request's neighbours change nothing of it, and it goes on from its own last token."""
        bench.require("disagg")
        together = take_over(bench, ["a", "b", "c"])
        for place, rid in enumerate(("a", "b", "c")):
            alone = take_over(bench, [rid])
            for name, tensor in vars(alone).items():
                assert torch.equal(vars(together)[name][place : place + 1], tensor), name
            assert torch.equal(alone.last_tokens_B, last_tokens([HandedOver(rid, {})]))

    def test_disagg_hands_on_what_rows_hold_bit_for_bit(self, bench: Bench) -> None:
        """All columns of the server's draft, as they were sent; a later batch changes no earlier one."""
        bench.require("disagg")
        batches = ("a", ABORTED, "b"), ("c", "d", "e")
        for shape in SHAPES:
            row = wire_row(bench, shape)
            answers = [take_over(bench, b, shape=shape) for b in batches]
            for rids, found in zip(batches, answers, strict=True):
                made = {"hidden": found.hidden_BH, "topk_p": found.topk_p_BK}
                made["topk_index"] = found.topk_index_BK
                for field in row:
                    sent = [request(rid, row).row[field.name] for rid in rids]
                    sent_BX = torch.stack([x[: field.needed] for x in sent if x is not None])
                    found_BX = made[field.name]
                    require_same_bits({field.name: found_BX}, {field.name: sent_BX}, OTHER_ROW)
                    bits = [x.contiguous().view(torch.uint8) for x in (found_BX, sent_BX)]
                    assert torch.equal(*bits), f"{OTHER_ROW}{field.name}: a zero has another sign"

    def test_disagg_answers_where_the_rows_lie_and_waits_for_nothing(self, bench: Bench) -> None:
        """Tensors without numbers show it."""
        bench.require("disagg")
        requests = [request(rid, row := wire_row(bench, SHAPE)) for rid in ("a", "b")]
        batch, tokens_B = check_rows(bench, arrivals(requests), row), last_tokens(requests)
        there: Any = {n: x.to("meta") for n, x in vars(batch).items() if isinstance(x, Tensor)}
        given: Any = {"batch": dataclasses.replace(batch, **there), "options": bench.options}
        try:
            found = bench.hook.build_disagg_draft_input(
                last_tokens=tokens_B.to("meta"), future_map=Log(), **given
            )
        except (DraftcoreError, RuntimeError) as error:
            pytest.fail(f"it reads numbers of the rows, or makes tensors elsewhere: {error}")
        others = [name for name, tensor in vars(found).items() if tensor.device.type != "meta"]
        assert not others, f"made elsewhere than where the rows lie: {', '.join(others)}"

    def test_disagg_asks_for_the_state_that_drafts_go_on_from(self, bench: Bench) -> None:
        """What of a drafter's state grows with the text travels with the KV cache, the rest in rows."""
        if not bench.offer.capabilities & {"disagg", "disagg-stateless"}:
            pytest.skip("the algorithm claims neither disagg nor disagg-stateless")
        told = Told(bench.drafter(bench.noisy), bench.texts, LENGTHS)
        before, more = told.drafts(), told.drafter.allocate(len(LENGTHS), 99)
        with torch.inference_mode():
            for state, other in zip(tensors(told.state), tensors(more), strict=True):
                if state.is_floating_point() and state.ndim > 1 and state.shape == other.shape:
                    state.copy_(state.flip(-1))
        drawn, asked = told.drafts().probs_BKV, {field.name for field in wire_row(bench, SHAPE)}
        same = torch.equal(drawn, before.probs_BKV)
        assert same or "hidden" in asked, (
            "drafts go on from a state of the draft that is in no KV cache, and nobody sends it\n"
            "return 'hidden' from disagg_row, and claim `disagg`, not `disagg-stateless`"
        )

    def test_disagg_names_the_request_and_the_field_that_is_missing(self, bench: Bench) -> None:
        """Of the row that was agreed upon: prefill and decode side ask for it apart."""
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        for field in row:
            full, log = [request(rid, row) for rid in ("a", "b", "c")], Log()
            full[1] = HandedOver("b", {**full[1].row, field.name: None})
            tokens_B = last_tokens(full)
            with pytest.raises(RowError, match=f"'b': {field.name} was not sent"):
                first_draft_input(bench, arrivals(full), tokens_B, log, SHAPE, lambda found: found)
            assert log.calls == [], "something was relayed of a batch that failed"
        assert wire_row(bench, SHAPE) == row

    def test_disagg_publishes_then_stashes_and_only_with_overlap(self, bench: Bench) -> None:
        """By the core, after the answer was checked: a hook that writes itself does it too early."""
        bench.require("disagg")
        found = take_over(bench, ["a", "b"], log := Log())
        assert log.calls == [("publish", [3, 5], [10, 11]), ("stash", [3, 5], found)]
        take_over(bench, ["a", "b"], log := Log(), overlap=False)
        assert log.calls == []
