"""Two-batch overlap: cuts are balanced, and split + merge equals whole, on any device."""

import random

import pytest
import torch
from draftcore_cudagraph.tbo import Cut, TwoBatchOverlap, balanced_cut, merge, split
from torch import Tensor

from draftcore.graphs import ShapeKey
from draftcore.graphs.recording import RecordingBackend


def random_lengths(seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randint(1, pick.choice([1, 3, 9])) for _ in range(pick.randint(1, 9))]


def random_batch(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths) + seed % 3  # some buckets are wider than their longest row
    return {
        "tokens_BT": torch.randint(50, (B, T), generator=generator),
        "hidden_BTH": torch.randint(-8, 8, (B, T, 4), generator=generator).double(),
        "positions_BT": torch.arange(T).expand(B, T),
        "lengths_B": torch.tensor(lengths),
    }


def halves_of(lengths: list[int], cut: Cut) -> tuple[int, int]:
    first = sum(lengths[: cut.row]) + cut.inside
    return first, sum(lengths) - first


# ---------------------------------------------------------------- where a batch is cut


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
def test_a_cut_balances_tokens_and_divides_a_request_only_where_it_must(lengths, cut):
    assert balanced_cut(lengths) == cut


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_leaves_a_half_empty_or_a_divided_batch_unbalanced(seed):
    lengths = random_lengths(seed)
    cut = balanced_cut(lengths)
    if cut is None:
        assert sum(lengths) < 2
        return
    first, second = halves_of(lengths, cut)
    assert min(first, second) > 0
    assert cut.inside < lengths[cut.row]
    if cut.inside:
        assert abs(first - second) <= 1
        assert len(lengths) + 1 <= sum(lengths)
    else:  # what is balanced, or all that there is
        assert min(first, second) >= 0.48 * sum(lengths) - 0.5 or len(lengths) + 1 > sum(lengths)


# ---------------------------------------------------------------- split + merge equals whole


def each_token(batch) -> dict[str, Tensor]:
    """Reads a token at a time, so a cut row needs nothing of its other half."""
    mixed = batch["hidden_BTH"] * batch["tokens_BT"][..., None] + batch["positions_BT"][..., None]
    return {"mixed": mixed, "pair": (batch["tokens_BT"] + 1, None)}


@pytest.mark.parametrize("seed", range(40))
def test_halves_merge_to_the_whole(seed):
    lengths = random_lengths(seed)
    batch, cut = random_batch(lengths, seed), balanced_cut(lengths)
    if cut is None:
        return
    first, second = split(batch, cut)
    for half, tokens in zip((first, second), halves_of(lengths, cut), strict=True):
        assert int(half["lengths_B"].sum()) == tokens
        assert half["tokens_BT"].shape[0] == len(half["lengths_B"]) == len(half["rows_B"])
    whole, merged = each_token(batch), merge(each_token(first), each_token(second), cut)
    assert torch.equal(merged["mixed"], whole["mixed"])
    assert torch.equal(merged["pair"][0], whole["pair"][0])
    assert merged["pair"][1] is None


def attention(batch, cache_BTH: Tensor) -> Tensor:
    """Causal linear attention over a cache, in whole numbers, so that sums have no order."""
    B, T, _ = batch["hidden_BTH"].shape
    at_BT = batch["starts_B"][:, None] + torch.arange(T)
    live_BT = torch.arange(T) < batch["lengths_B"][:, None]
    rows_BT = batch["rows_B"][:, None].expand(B, T)
    cache_BTH[rows_BT[live_BT], at_BT[live_BT]] = batch["hidden_BTH"][live_BT]
    seen_BTS = torch.arange(cache_BTH.shape[1]) <= at_BT[..., None]
    keys_BSH = cache_BTH[batch["rows_B"]]
    scores_BTS = (batch["hidden_BTH"] @ keys_BSH.transpose(1, 2)) * seen_BTS
    return scores_BTS @ keys_BSH * live_BT[..., None]


@pytest.mark.parametrize("seed", range(40))
def test_halves_that_attend_through_a_cache_merge_to_the_whole(seed):
    """The first half first: a request that is cut reads its own beginning there."""
    lengths = random_lengths(seed)
    batch, cut = random_batch(lengths, seed), balanced_cut(lengths)
    if cut is None:
        return
    B, T = batch["tokens_BT"].shape
    alone = {**batch, "rows_B": torch.arange(B), "starts_B": torch.zeros(B, dtype=torch.long)}
    whole = attention(alone, torch.zeros(B, T, 4).double())
    cache = torch.zeros(B, T, 4).double()
    first, second = (attention(half, cache) for half in split(batch, cut))
    assert torch.equal(merge(first, second, cut), whole)


# ---------------------------------------------------------------- in graphs


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_replay_changes_the_counts_and_nothing_else(rows):
    """The whole, by halves, as a recorded graph; the counts at an address that stays."""
    tbo, backend, key = TwoBatchOverlap(), RecordingBackend(), ShapeKey(rows, 4)
    batch = random_batch([4] * rows, 0)

    def work() -> tuple[Tensor, Tensor]:
        return tbo.run(key, batch, each_token)["mixed"], tbo.counts_2 + 0

    tbo.on_capture(key, batch)
    address, cut = tbo.counts_2.data_ptr(), tbo.cuts[key]
    assert (tbo.counts_2.dtype, tbo.counts_2.tolist()) == (torch.int32, [2 * rows, 2 * rows])
    with backend.capture_session():
        backend.capture_one(key, work)
    batch["lengths_B"][-1] = 1
    batch["tokens_BT"].add_(3)
    tbo.on_replay(key, batch)
    mixed, counts = backend.replay(key)
    assert torch.equal(mixed, each_token(batch)["mixed"])
    first = sum(min(length, 4) for length in batch["lengths_B"].tolist()[: cut.row])
    first += min(cut.inside, int(batch["lengths_B"][cut.row]))
    assert counts.tolist() == [first, 4 * rows - 3 - first]
    assert tbo.counts_2.data_ptr() == address
    assert tbo.cuts == {key: cut}


def test_buckets_share_the_counts():
    tbo = TwoBatchOverlap()
    for rows in (4, 2):
        tbo.on_capture(ShapeKey(rows, 4), random_batch([4] * rows, 0))
    address = tbo.counts_2.data_ptr()
    tbo.on_replay(ShapeKey(4, 4), random_batch([1, 2, 3, 4], 0))
    assert (tbo.counts_2.tolist(), tbo.counts_2.data_ptr()) == ([3, 7], address)


def test_rows_of_one_token_are_counted_as_one_whatever_their_cache_holds():
    """A decoding batch: `lengths_B` are those of the caches, and there is nothing per token."""
    tbo, batch = TwoBatchOverlap(), {"last_B": torch.zeros(3), "lengths_B": torch.full((3,), 77)}
    tbo.on_capture(ShapeKey(3, 128), batch)
    assert tbo.cuts[ShapeKey(3, 128)] == Cut(1)
    assert tbo.counts_2.tolist() == [1, 2]


def test_a_single_token_stays_whole():
    tbo, key, batch = TwoBatchOverlap(), ShapeKey(1, 1), random_batch([1], 0)
    tbo.on_capture(key, batch)
    assert tbo.counts_2.tolist() == [1, 0]
    assert torch.equal(tbo.run(key, batch, each_token)["mixed"], each_token(batch)["mixed"])
