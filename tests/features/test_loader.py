"""The loader: equal samples from a capture and a store, few of them open at once, no endless wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_file.store import FileStore

from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch
from draftcore.contracts.run import Loaded, RunEnded
from draftcore.contracts.store import SampleRef, StoreError
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.errors import DraftcoreError
from draftcore.features.checks import ref_error
from draftcore.features.loader import Loader
from draftcore.run.train import TEXT_BYTES
from tests.features import world as made
from tests.features.world import KINDS, Mixing, World, loader, read, require_equal, within

NAME, WIDTH = made.NAMES[0], made.WIDTH
Change = Callable[[SampleRef], SampleRef]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("kind", "skipped", "bad"),
    [
        *((Mixing, skipped, ()) for skipped in ([], [4], [0, 3, 7], range(11))),
        *((kind, [], (2, 5)) for kind in KINDS),
    ],
)
def test_a_capture_and_a_store_give_the_same_samples_to_the_bit(
    tmp_path: Path, kind: type[Mixing], skipped: Sequence[int], bad: Sequence[int]
) -> None:
    """Left out are rows that were skipped, also where a batch, or all of them, has none left.

    And those that turn out bad: the others of their batch are captured without them.
    """
    world = World(tmp_path, skipped=skipped)
    world.capture = lambda: kind(bad=bad)
    left = set(range(11)) - {*skipped, *bad}
    wanted = read(world.captured())
    assert len(wanted) == 2 * len(left)
    assert {int(one[1], 16) for one in wanted} == left
    assert {one[3] for one in wanted} <= {"torch.int64 torch.bool"}
    assert not bad or "row 5" in world.skipped[5]
    require_equal(read(world.stored()), wanted)
    assert set(world.skipped) == {*skipped, *bad}
    for ref in world.store.lookup(world.samples.feature_ids).values():
        assert ref.nbytes == ref.tokens * (world.request.token_bytes(WIDTH) + TEXT_BYTES)


def test_too_many_bad_rows_end_the_iteration_with_their_names(world: World) -> None:
    world.capture = lambda: Mixing(bad=range(11))
    source = world.captured()
    world.skipped.most = 1
    batches = loader(source)
    with pytest.raises(DraftcoreError, match=r"\d rows cannot be trained on"):
        list(batches)
    within(batches.close)


def test_a_store_of_another_cut_is_read_row_by_row(world: World) -> None:
    ids, lengths = world.samples.feature_ids, world.samples.lengths.tolist()
    found = read(world.stored(Plan(ids, lengths, batch=5, accumulate=1, seed=0)))
    with closing(FileStore(world.folder / "features")) as store:
        refs = store.lookup(ids)
        for one in found:
            with store.get(refs[one[1]]) as handle:
                assert torch.equal(handle.tensors[NAME], one[6][NAME])


def test_a_torn_sample_is_named_and_left_as_it_is(world: World) -> None:
    source = world.stored()
    shard = sorted((world.folder / "features").glob("*.safetensors"))[2]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match=r"sample '0.*(\n.*)*run again"):
        read(source)
    assert shard.read_bytes() == data


def test_a_sample_that_the_store_lacks_is_named_with_a_remedy(world: World) -> None:
    source = world.stored()
    world.store.free(world.store.lookup(world.samples.feature_ids[4:5]).values())
    with pytest.raises(DraftcoreError, match=r"missing from the store file:.*\n  run `draftcore"):
        read(source)


def without(name: str) -> Change:
    return lambda ref: replace(ref, tensors=tuple(s for s in ref.tensors if s.name != name))


def features(**changes: Any) -> Change:
    def change(ref: SampleRef) -> SampleRef:
        (old,) = (spec for spec in ref.tensors if spec.name == NAME)
        others = without(NAME)(ref).tensors
        return replace(ref, tensors=(*others, replace(old, **changes)))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ref: replace(ref, feature_id="another"), "refs of other samples"),
        (lambda ref: replace(ref, provenance="another"), "was captured as"),
        (without("hidden.1"), "has 'hidden.1' of None"),
        (without("loss_mask"), "lacks loss_mask"),
        (features(shape=(2, WIDTH)), "chunked prefill or a prefix cache"),
        (features(shape=(4, WIDTH + 1)), "has 'hidden.1' of"),
        (features(dtype="bfloat16"), "has 'hidden.1' of"),
    ],
)
def test_refs_that_do_not_fit_are_told_why(world: World, change: Change, said: str) -> None:
    """Of one row that is odd, the others of its batch are good."""
    planned = next(one for one in world.plan.uses(0) if one.rows[1:] == (10,))  # of 4 tokens
    batch = batch_of(planned.index, planned.rows, world.samples)
    masks = [world.samples.loss_mask(row).tolist() for row in batch.rows]
    with closing(FileStore(world.folder / "one")) as store:
        first, last = world.checked().begin(batch, masks, store, made.ORIGIN)()

    def wrong(*refs: SampleRef) -> DraftcoreError | None:
        return ref_error(batch, refs, world.request.feature_specs(WIDTH), made.ORIGIN)

    assert wrong(first, last) is None
    assert said in str(found := wrong(first, change(last)))
    if "other samples" in said:
        assert said in str(wrong(first))
        assert said in str(wrong(last, first))
    else:
        assert isinstance(found, BadRows)
        assert list(found.reasons) == [1]


class Counted:
    """Batches that count how many are open, and may wait or fail at a position."""

    def __init__(self, world: World, *, waits_at: int = -1, fails_at: int = -1) -> None:
        self.uses, self.waits_at, self.fails_at = world.plan.uses(0), waits_at, fails_at
        self.open = self.most = self.reads = 0
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[Loaded | None]:
        for planned in self.uses:
            self.note(reads=1)
            while planned.position == self.waits_at:
                time.sleep(0.01)
                yield None
            if planned.position == self.fails_at:
                raise DraftcoreError("this one is broken")
            self.note(opened=1)
            loaded = Loaded(planned, [])
            loaded.handles.callback(self.let_go)
            yield loaded

    def let_go(self) -> None:
        self.note(opened=-1)

    def note(self, reads: int = 0, opened: int = 0) -> None:
        with self.changed:
            self.reads += reads
            self.open += opened
            self.most = max(self.most, self.open)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, made.SOON)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_no_more_than_one_batch_beside_those_ahead_is_open(world: World, ahead: int) -> None:
    """With none ahead they are read in the thread that trains."""
    source, threads = Counted(world), threading.active_count()
    batches, uses = loader(source, ahead), len(list(world.plan.uses(0)))
    for number, _ in enumerate(batches, 1):
        wanted = 1 + min(ahead, uses - number)
        source.wait_for(lambda wanted=wanted: source.open == wanted)  # type: ignore[misc]
        assert ahead or (source.reads, threading.active_count()) == (number, threads)
    assert (number, source.most, source.open) == (uses, ahead + 1, 0)
    within(batches.close)


def test_a_batch_is_closed_when_the_next_is_asked_for_or_when_it_is_let_go(world: World) -> None:
    source = Counted(world)
    batches = loader(source, 1)
    next(batches)
    source.wait_for(lambda: source.open == 2)
    batches.release_batch()
    batches.release_batch()
    assert source.open == 1
    next(batches)
    source.wait_for(lambda: source.open == 2)
    within(batches.close)
    assert source.open == 0


def test_being_asked_to_stop_ends_the_iteration_while_it_waits(world: World) -> None:
    source, stop = Counted(world, waits_at=3), threading.Event()
    batches = Loader(source, ahead=2, device=made.CPU, stop=stop.is_set)
    seen = [next(batches).planned.position for _ in range(3)]
    source.wait_for(lambda: source.reads == 4)
    stop.set()
    within(lambda: seen.extend(batch.planned.position for batch in batches))
    assert seen == [0, 1, 2]
    within(batches.close)
    assert source.open == 0


def test_a_capture_that_was_asked_to_stop_ends_the_iteration(world: World) -> None:
    """It heard of that as it waited for a server."""

    class Stopped(Mixing):
        def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
            raise RunEnded("asked to stop", "interrupted")

    world.capture = Stopped
    assert read(world.captured()) == []


def test_an_error_of_the_thread_is_raised_where_its_batch_is_asked_for(world: World) -> None:
    source = Counted(world, fails_at=2)
    batches = loader(source, 5)
    assert [next(batches).planned.position for _ in range(2)] == [0, 1]
    with pytest.raises(DraftcoreError, match="this one is broken"):
        next(batches)
    within(batches.close)
    assert source.open == 0


@pytest.mark.parametrize("state", ["full", "waiting", "failed", "ended", "untouched"])
def test_closing_never_hangs_and_leaves_nothing_open(world: World, state: str) -> None:
    kinds = {"waiting": Counted(world, waits_at=1), "failed": Counted(world, fails_at=1)}
    source = kinds.get(state, Counted(world))
    batches = loader(source, 2)
    if state == "full":
        next(batches)
        source.wait_for(lambda: source.open == 3)
    elif state == "waiting" or state == "failed":
        source.wait_for(lambda: source.reads == 2)
    elif state == "ended":
        assert len(list(batches)) == len(list(world.plan.uses(0)))
    within(batches.close)
    assert source.open == 0
