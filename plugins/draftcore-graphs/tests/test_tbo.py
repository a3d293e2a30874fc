"""Two-batch overlap: cuts are balanced, and split + merge equals whole, on any device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_graphs.tbo import Cut, Halves, TwoBatchOverlap, balanced_cut, merge, split
from draftcore_sdk.suite import hooks_of, offer_of, options_of
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Batch, GraphPlugin, Outputs, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore.target import TransformersModel, TransformersTarget

PLUGIN = "draftcore_graphs.plugin"
REQUEST = FeatureRequest((0, 3), True, "float32")


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
        "live_B": torch.ones(B, dtype=torch.bool),
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
def test_a_cut_balances_tokens_and_divides_a_request_only_where_it_must(
    lengths: list[int], cut: Cut | None
) -> None:
    assert balanced_cut(lengths) == cut


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_leaves_a_half_empty_or_a_divided_batch_unbalanced(seed: int) -> None:
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


def each_token(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
    """Reads a token at a time, so a cut row needs nothing of its other half."""
    mixed = batch["hidden_BTH"] * batch["tokens_BT"][..., None] + batch["positions_BT"][..., None]
    return {"mixed": mixed, "pair": (batch["tokens_BT"] + 1, None)}


@pytest.mark.parametrize("seed", range(40))
def test_halves_merge_to_the_whole(seed: int) -> None:
    lengths = random_lengths(seed)
    batch, cut = random_batch(lengths, seed), balanced_cut(lengths)
    if cut is None:
        return
    first, second = split(batch, cut)
    for half, tokens in zip((first, second), halves_of(lengths, cut), strict=True):
        assert int(half["lengths_B"].sum()) == tokens
        assert half["tokens_BT"].shape[0] == len(half["lengths_B"]) == len(half["live_B"])
    whole, merged = each_token(batch), merge(each_token(first), each_token(second), cut)
    assert torch.equal(merged["mixed"], whole["mixed"])
    assert torch.equal(merged["pair"][0], whole["pair"][0])
    assert merged["pair"][1] is None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tiny_target(tmp_path_factory.mktemp("target"))
    return TransformersModel(TransformersTarget(str(folder), device="cpu"))


def runner_of(target: TargetModel, rows: int, *plugins: GraphPlugin) -> PrefillGraphRunner:
    phase = Phase("prefill", "recording", rows=(rows,), lengths=(1, 6, 16))
    return PrefillGraphRunner(target, phase, RecordingBackend(), plugins)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_a_targets_prefill_by_halves_has_the_features_of_the_whole(
    target: TargetModel, rows: int
) -> None:
    """fp32: sums in another order, of numbers of about 3; 1.6e-6 seen (2026-11)."""
    tbo, generator = TwoBatchOverlap(), torch.Generator().manual_seed(rows)
    halved, plain = runner_of(target, rows, tbo), runner_of(target, rows)
    for length in (16, 11, 6, 2, 1):
        tokens_BT = torch.randint(200, (rows, length), generator=generator)
        lengths_B = torch.randint(1, length + 1, (rows,), generator=generator)
        found = halved.features(tokens_BT, lengths_B, REQUEST)
        whole = plain.features(tokens_BT, lengths_B, REQUEST)
        for name in REQUEST.names:
            torch.testing.assert_close(found[name], whole[name], rtol=0, atol=4e-6)
        assert int(tbo.counts_2.sum()) == int(lengths_B.sum())
    assert halved.counts == {"replayed": 5}
    cuts = [cut for key, cut in tbo.cuts.items() if rows * key.length > 1]
    assert None not in cuts
    odd = [cut.inside > 0 for key, cut in tbo.cuts.items() if cut and key.length > 1]
    assert odd == [rows % 2 == 1] * 2  # rows of one length, of which the middle one is cut


def test_a_replay_has_the_bits_of_the_same_halves_run_eagerly(target: TargetModel) -> None:
    tbo = TwoBatchOverlap()
    runner, key = runner_of(target, 3, tbo), ShapeKey(3, 16, ",".join(REQUEST.names))
    tokens_BT = torch.randint(200, (3, 16), generator=torch.Generator().manual_seed(0))
    found = runner.features(tokens_BT, torch.full((3,), 16), REQUEST)
    batch = runner.buffers.view(key)
    eager = Halves(runner.work(key), tbo.cuts[key], batch)(batch)
    for name in REQUEST.names:
        assert torch.equal(found[name], eager[name])


# ---------------------------------------------------------------- in graphs


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_replay_changes_the_counts_and_nothing_else(rows: int) -> None:
    """The whole, by halves, as a recorded graph; the counts at an address that stays."""
    tbo, backend, key = TwoBatchOverlap(), RecordingBackend(), ShapeKey(rows, 4)
    batch = random_batch([4] * rows, 0)
    work = tbo.on_capture(key, batch, each_token)
    assert isinstance(work, Halves)
    address, cut = tbo.counts_2.data_ptr(), tbo.cuts[key]
    assert (tbo.counts_2.dtype, tbo.counts_2.tolist()) == (torch.int32, [2 * rows, 2 * rows])
    with backend.capture_session():
        backend.capture_one(key, lambda: (work(batch)["mixed"], tbo.counts_2 + 0))
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


def test_rows_of_padding_are_not_counted_whatever_they_hold() -> None:
    tbo, key, batch = TwoBatchOverlap(), ShapeKey(4, 4), random_batch([4, 3, 2, 4], 0)
    tbo.on_capture(key, batch, each_token)
    assert tbo.counts_2.tolist() == [7, 6]
    batch["live_B"][3] = False
    tbo.on_replay(key, batch)
    assert tbo.counts_2.tolist() == [7, 2]


def test_buckets_share_the_counts() -> None:
    tbo = TwoBatchOverlap()
    for rows in (4, 2):
        tbo.on_capture(ShapeKey(rows, 4), random_batch([4] * rows, 0), each_token)
    address = tbo.counts_2.data_ptr()
    tbo.on_replay(ShapeKey(4, 4), random_batch([1, 2, 3, 4], 0))
    assert (tbo.counts_2.tolist(), tbo.counts_2.data_ptr()) == ([3, 7], address)


def test_a_single_token_stays_whole() -> None:
    tbo, key, batch = TwoBatchOverlap(), ShapeKey(1, 1), random_batch([1], 0)
    assert tbo.on_capture(key, batch, each_token) is each_token
    assert tbo.counts_2.tolist() == [1, 0]


def test_the_share_below_which_a_row_is_cut_is_an_option() -> None:
    lengths = random_batch([4] * 3, 0)
    opened = [
        hooks_of(PLUGIN).graph_plugin(
            name="tbo", options=options_of(offer_of(PLUGIN, "graph-plugin", "tbo"), given)
        )
        for given in ({}, {"least_share": 0.3})
    ]
    for plugin in opened:
        plugin.on_capture(ShapeKey(3, 4), lengths, each_token)
    assert [list(plugin.cuts.values()) for plugin in opened] == [[Cut(1, 2)], [Cut(1)]]


def test_what_another_plugin_has_cut_is_not_cut_again() -> None:
    calls = []

    def noting(batch: Batch, ends: Any = None, begins: Any = None) -> Outputs:
        calls.append((len(batch["lengths_B"]), ends is not None, begins is not None))
        return each_token(batch)

    key, batch = ShapeKey(1, 4), random_batch([4], 0)
    inner = TwoBatchOverlap().on_capture(key, batch, noting)
    outer = TwoBatchOverlap().on_capture(key, batch, inner)
    assert torch.equal(outer(batch)["mixed"], each_token(batch)["mixed"])
    assert calls == [(1, True, False), (1, False, True)]
