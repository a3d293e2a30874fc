"""Two-batch overlap: cuts are balanced, and split + merge equals whole, on any device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draftcore_graphs.tbo import Cut, TwoBatchOverlap, balanced_cut, merge, split
from draftcore_sdk.suite import opened
from torch import Tensor

from draftcore.contracts.runner import Batch, Outputs, ShapeKey


def random_batch(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths) + seed % 3  # some buckets are wider than their longest row
    return {
        "tokens_BT": torch.randint(50, (B, T), generator=generator),
        "hidden_BTH": torch.randint(-8, 8, (B, T, 4), generator=generator).double(),
        "positions_BT": torch.arange(T).expand(B, T),
        "lengths_B": torch.tensor(lengths),
    }


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([5, 5], Cut(1)),
        ([4, 1, 1, 4], Cut(2)),
        ([49, 51], Cut(1)),  # 0.49 of the tokens: balanced enough
        ([47, 53], Cut(1, 3)),  # 0.47 are not, so the second request gives three
        ([10], Cut(0, 5)),
        ([9, 1], Cut(0, 5)),
        ([1, 1, 1], Cut(1)),  # a further request would make four of three tokens
        ([1, 1], Cut(1)),
        ([2], Cut(0, 1)),
        ([1], None),
        ([], None),
        ([0, 0], None),
    ],
)
def test_a_cut_balances_tokens_and_divides_a_request_only_where_it_must(
    lengths: list[int], cut: Cut | None
) -> None:
    assert balanced_cut(lengths) == cut


def each_token(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
    """Reads a token at a time, so a cut row needs nothing of its other half."""
    mixed = batch["hidden_BTH"] * batch["tokens_BT"][..., None] + batch["positions_BT"][..., None]
    return {"mixed": mixed, "pair": (batch["tokens_BT"] + 1, None)}


@pytest.mark.parametrize("seed", range(40))
def test_halves_are_balanced_and_merge_to_the_whole(seed: int) -> None:
    pick = random.Random(seed)
    lengths = [pick.randint(1, pick.choice([1, 3, 9])) for _ in range(pick.randint(1, 9))]
    batch, cut, total = random_batch(lengths, seed), balanced_cut(lengths), sum(lengths)
    if cut is None:
        assert total < 2
        return
    first, second = split(batch, cut)
    tokens = [int(half["lengths_B"].sum()) for half in (first, second)]
    assert tokens[0] == sum(lengths[: cut.row]) + cut.inside == total - tokens[1]
    crowded = len(lengths) + 1 > total  # a further row would make more rows than tokens
    if cut.inside:
        assert abs(tokens[0] - tokens[1]) <= 1
        assert not crowded
    else:
        assert min(tokens) >= (1 if crowded else max(1, 0.48 * total - 0.5))
    whole, merged = each_token(batch), merge(each_token(first), each_token(second), cut)
    assert torch.equal(merged["mixed"], whole["mixed"])
    assert torch.equal(merged["pair"][0], whole["pair"][0])
    assert merged["pair"][1] is None


def test_a_share_says_where_a_row_is_cut_and_another_plugins_cut_is_not_cut_again() -> None:
    """A batch of three rows of four; with another share it is cut between rows."""
    calls, key, batch = [], ShapeKey(3, 4), random_batch([4] * 3, 0)

    def noting(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
        calls.append((len(batch["lengths_B"]), ends is not None, begins is not None))
        return each_token(batch)

    for given, right in (
        ({}, [(2, True, False), (2, False, True)]),
        ({"least_share": 0.3}, [(1, False, False), (2, False, False)]),
    ):
        plugin = opened("draftcore_graphs.plugin", "graph-plugin", "tbo", given)
        outer = TwoBatchOverlap().on_capture(key, batch, plugin.on_capture(key, batch, noting))
        assert torch.equal(outer(batch)["mixed"], each_token(batch)["mixed"])
        assert calls == [(2, True, False), (2, False, True)]
        calls.clear()
        plugin.on_capture(key, batch, noting)(batch)
        assert calls == right
        calls.clear()
