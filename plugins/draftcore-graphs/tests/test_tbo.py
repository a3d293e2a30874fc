"""Two-batch overlap: cuts are balanced, and split + merge equals whole, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftcore_graphs.tbo import Cut, TwoBatchOverlap, balanced_cut, merge, split
from draftcore_sdk.suite import opened
from torch import Tensor

from draftcore.contracts.runner import Batch, Outputs, ShapeKey


def batch_of(rows: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + width)
    return {
        "tokens_BT": torch.randint(50, (rows, width), generator=generator),
        "hidden_BTH": torch.randint(-8, 8, (rows, width, 4), generator=generator).double(),
        "positions_BT": torch.arange(width).expand(rows, width),
        "lengths_B": torch.full((rows,), width),
    }


def each_token(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
    """Reads a token at a time, so a cut row needs nothing of its other half."""
    mixed = batch["hidden_BTH"] * batch["tokens_BT"][..., None] + batch["positions_BT"][..., None]
    return {"mixed": mixed, "pair": (batch["tokens_BT"] + 1, None)}


@pytest.mark.parametrize(
    ("rows", "width", "cut"),
    [
        (2, 5, Cut(1)),
        (4, 3, Cut(2)),
        (51, 2, Cut(25)),  # 0.49 of the tokens: balanced enough
        (3, 4, Cut(1, 2)),  # a third is not, so the second row gives two
        (5, 3, Cut(2, 1)),
        (1, 10, Cut(0, 5)),
        (1, 2, Cut(0, 1)),
        (3, 1, Cut(1)),  # a further row would make four of three tokens
        (1, 1, None),
    ],
)
def test_a_cut_balances_tokens_and_halves_merge_to_the_whole(
    rows: int, width: int, cut: Cut | None
) -> None:
    assert balanced_cut(rows, width) == cut
    if cut is not None:
        batch = batch_of(rows, width)
        first, second = split(batch, cut)
        tokens = [int(half["lengths_B"].sum()) for half in (first, second)]
        assert tokens == [cut.row * width + cut.inside, (rows - cut.row) * width - cut.inside]
        whole, merged = each_token(batch), merge(each_token(first), each_token(second), cut)
        assert torch.equal(merged["mixed"], whole["mixed"])
        assert torch.equal(merged["pair"][0], whole["pair"][0])
        assert merged["pair"][1] is None


def test_a_share_says_where_a_row_is_cut_and_another_plugins_cut_is_not_cut_again() -> None:
    calls, key, batch = [], ShapeKey(3, 4), batch_of(3, 4)

    def noting(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
        calls.append((len(batch["lengths_B"]), ends is not None, begins is not None))
        return each_token(batch)

    within, between = [(2, True, False), (2, False, True)], [(1, False, False), (2, False, False)]
    for given, right in (({}, within), ({"least_share": 0.3}, between)):
        plugin = opened("draftcore_graphs.plugin", "graph-plugin", "tbo", given)
        inner = plugin.on_capture(key, batch, noting)
        assert torch.equal(inner(batch)["mixed"], each_token(batch)["mixed"])
        TwoBatchOverlap().on_capture(key, batch, inner)(batch)
        assert calls == right + within
        calls.clear()
