"""The loader: equal samples from every source, few of them open at once, and an end to every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftcore.features.storing import fill, put_batch
from draftcore_disagg.channel import Json, RunEnded
from draftcore_disagg.producer import produce
from draftcore_disagg.queue import Queue, RemoteQueue
from draftcore_disagg.queued import queued, tasks_of
from draftcore_file.store import FileStore
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_shm.store import ShmStore
from numpy.typing import NDArray
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import (
    BadRows,
    Capture,
    CaptureBatch,
    CapturedBatch,
    FeatureRequest,
    Image,
)
from draftcore.contracts.run import PlannedBatch
from draftcore.contracts.store import (
    FeatureStore,
    Handle,
    SampleRef,
    StoreAway,
    StoreError,
    StoreItem,
)
from draftcore.data.plan import Plan
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.features.checks import ref_error
from draftcore.features.loader import Captured, Loaded, Loader, stored
from draftcore.run.features import TEXT_BYTES
from tests.features.conftest import SOON, Loopback

NAMES, WIDTH, ORIGIN = ("hidden.1",), 2, "as always"
CPU = torch.device("cpu")
Change = Callable[[SampleRef], SampleRef]
Batches = Iterable[Loaded | None]


class Rows:
    """The training samples: rows of 3 to 9 tokens."""

    def __init__(self, count: int) -> None:
        self.feature_ids = tuple(f"{row:064x}" for row in range(count))
        self.lengths: NDArray[np.int64] = np.array([3 + 5 * row % 7 for row in range(count)])
        tokens = int(self.lengths.sum())
        self.summary = DataSummary("f", count, tokens, tokens, 9, {})

    def tokens(self, row: int) -> NDArray[np.int64]:
        return np.arange(self.lengths[row]) + row

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.array([at % 3 != row % 3 for at in range(self.lengths[row])])

    def images(self, row: int) -> tuple[Image, ...]:
        return ()


class Mixing:
    """A capture whose features depend on the batch that a row is in, as a real one's last bits do."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad, self.captured, self.closed = set(bad), list[int](), 0

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            wrong = {
                at: f"row {row} is bad" for at, row in enumerate(batch.rows) if row in self.bad
            }
            if wrong:
                raise BadRows(wrong)
            self.captured.append(batch.index)
            scale = batch.padded_length + 0.1 * len(batch.rows)
            rows = [torch.tensor(ids).float() * scale for ids in batch.token_ids]
            yield CapturedBatch(
                batch, tuple({NAMES[0]: torch.stack([row, -row], dim=1)} for row in rows)
            )

    def close(self) -> None:
        self.closed += 1


class Delivering(Mixing):
    """One that puts features into the store by itself."""

    def reaches(self, store: FeatureStore) -> bool:
        return True

    def deliver(
        self, batch: CaptureBatch, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]:
        (captured,) = self.features([batch])
        rows = zip(batch.ids, captured.features, text, strict=True)
        return to.put_many(
            [StoreItem(one, {**own, **t}, len(t["token_ids"]), origin) for one, own, t in rows]
        )


class Far(Delivering):
    """One that could do so, but not into this store."""

    def reaches(self, store: FeatureStore) -> bool:
        return False

    def deliver(self, *args: Any) -> tuple[SampleRef, ...]:
        raise AssertionError("it does not reach the store")


class Infinite(Mixing):
    """One whose bad rows show by their features."""

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        bad, self.bad = self.bad, set()
        for one in super().features(batches):
            for row, features in zip(one.batch.rows, one.features, strict=True):
                if row in bad:
                    features[NAMES[0]][-1, 1] = torch.nan
            yield one
        self.bad = bad


class World:
    """A plan, and the sources that a run may have for it."""

    def __init__(
        self, folder: Path, rows: int = 11, *, skipped: Sequence[int] = (), **plan: Any
    ) -> None:
        self.folder, self.samples = folder, Rows(rows)
        self.forms: dict[str, tuple[int, str]] = {NAMES[0]: (WIDTH, "float32")}
        settings = {"batch": 2, "accumulate": 2, "seed": 3, "epochs": 2, **plan}
        self.plan = Plan(self.samples.feature_ids, self.samples.lengths.tolist(), **settings)
        self.skipped_before = dict.fromkeys(skipped, "bad before")
        self.skipped = self.skips()  # of the batches that were opened last
        self.patience = SOON
        self.capture: Callable[[], Capture] = Mixing
        self.closing = ExitStack()

    def skips(self) -> Skipped:
        return Skipped(self.skipped_before, rows=len(self.samples.feature_ids), share=1)

    def prepare(self, about: Json) -> tuple[Capture, str]:
        return self.capture(), ORIGIN

    def captured(self) -> Batches:
        self.skipped = self.skips()
        return Captured(self.plan.uses(0), self.capture(), self.samples, self.plan, self.skipped)

    def stored(self, plan: Plan | None = None) -> Batches:
        """Read a store, filled with all of a plan's batches as `draftcore capture` does."""
        self.store: FeatureStore = FileStore(self.folder / "features")
        skipped = self.skipped = self.skips()
        batches = [
            PlannedBatch(at, 0, 0, 0, at, rows)
            for at, rows in enumerate((plan or self.plan).batches)
        ]
        for _ in fill(batches, self.capture(), self.store, ORIGIN, self.samples, skipped):
            pass
        return stored(self.plan.uses(0), self.store, self.plan, skipped, [*self.forms])

    def queued(
        self,
        producers: int = 1,
        ahead: int = 3,
        open_store: Callable[[str], FeatureStore] = ShmStore.open,
        keeps: bool = False,
    ) -> Batches:
        place = "file:{}" if keeps else "shm:{}?max_bytes=1MiB"
        self.store = store = open_store(place.format(self.folder / "ring"))
        self.closing.callback(store.close)
        self.skipped = self.skips()
        queue = self.queue = Queue(
            {"store": store.uri}, ahead=ahead, limit=1 << 19, skipped=self.skipped,
            free=(lambda refs: None) if keeps else store.free,
            ref_error=lambda task, refs: ref_error(task, refs, self.forms, ORIGIN),
        )  # fmt: skip
        queue.offer(tasks_of(self.plan.uses(0), self.samples, self.plan, 24), 0)
        ends = [RemoteQueue(Loopback(queue)) for _ in range(producers)]
        for end in ends:
            opens = FileStore.open if keeps else ShmStore.open
            arguments = [end, self.prepare, opens, lambda: False, SOON]
            thread = threading.Thread(target=produce, args=arguments, daemon=True)
            thread.start()
            self.closing.callback(thread.join, SOON)
        self.closing.callback(queue.end, "finished")
        names = [*self.forms]
        return queued(self.plan.uses(0), queue, store, self.plan, names, self.patience)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    with found.closing:
        yield found


def loader(batches: Batches, ahead: int = 2) -> Loader:
    here = isinstance(batches, Captured)
    return Loader(batches, ahead=0 if here else ahead, device=CPU, stop=lambda: False)


Read = list[tuple[int, str, int, str, list[int], list[bool], dict[str, Tensor]]]


def read(source: Batches, ahead: int = 2) -> Read:
    """All that training sees of a run's samples, in order."""
    found: Read = []
    batches = loader(source, ahead)
    for batch in batches:
        for one in batch.samples:
            features = {name: value.clone() for name, value in one.features.items()}
            place = batch.planned.position, one.id.feature_id, one.id.epoch
            text = one.token_ids_T.tolist(), one.loss_mask_T.tolist()
            kinds = f"{one.token_ids_T.dtype} {one.loss_mask_T.dtype}"
            found.append((*place, kinds, *text, features))
    batches.close()
    return found


def require_equal(found: Read, wanted: Read) -> None:
    """Compare to the bit, types included."""
    assert [one[:6] for one in found] == [one[:6] for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[6].keys() == theirs[6].keys()
        for name, value in theirs[6].items():
            assert ours[6][name].dtype == value.dtype
            assert torch.equal(ours[6][name], value), (ours[:2], name)


# ---------------------------------------------------------------- equal samples


def test_every_source_gives_the_same_samples_to_the_bit(world: World) -> None:
    wanted = read(world.captured())
    assert len(wanted) == 2 * 11
    assert {one[3] for one in wanted} == {"torch.int64 torch.bool"}
    require_equal(read(world.stored()), wanted)
    require_equal(read(world.queued(producers=3)), wanted)
    assert world.queue.status().nbytes > 0
    world.queue.advance(10**6)
    store = ShmStore.open(f"shm:{world.folder / 'ring'}")
    assert store.stats().samples == 0
    store.close()


def test_so_do_they_with_a_real_target(tmp_path: Path, target_folder: Path) -> None:
    """Padding and batch size change its last bits; the plan's batches do not differ."""
    world = World(tmp_path, rows=7, batch=3, accumulate=1, epochs=1)
    target = TransformersTarget(str(target_folder), device="cpu")
    request = FeatureRequest((1, 3), True, "float32", topk=5, embeddings=True)
    world.forms = request.feature_specs(48)
    world.capture = lambda: LocalCapture(target, request)
    wanted = read(world.captured())
    assert set(wanted[0][6]) == set(request.names)
    require_equal(read(world.stored()), wanted)
    store = FileStore(tmp_path / "features")
    for ref in store.lookup(world.samples.feature_ids).values():
        assert ref.nbytes == ref.tokens * (request.token_bytes(48) + TEXT_BYTES)
    with world.closing:
        require_equal(read(world.queued()), wanted)


@pytest.mark.parametrize("skipped", [[4], [0, 3, 7], list(range(11))])
def test_skipped_rows_are_left_out_in_every_source(tmp_path: Path, skipped: list[int]) -> None:
    """Also where a batch, or all of them, has none left."""
    world = World(tmp_path, skipped=skipped)
    wanted = read(world.captured())
    rows = {int(one[1], 16) for one in wanted}
    assert rows == set(range(11)) - set(skipped)
    require_equal(read(world.stored()), wanted)
    with world.closing:
        require_equal(read(world.queued()), wanted)


@pytest.mark.parametrize("kind", [Mixing, Infinite, Delivering, Far])
def test_rows_that_turn_out_bad_are_left_out_in_every_source(
    tmp_path: Path, kind: type[Mixing]
) -> None:
    """The others of their batch are captured without them."""
    world = World(tmp_path, epochs=1)
    world.capture = lambda: kind(bad=[2, 5])
    wanted = read(world.captured())
    assert set(world.skipped) == {2, 5}
    assert "row 5" in world.skipped[5]
    assert len(wanted) == 9
    require_equal(read(world.stored()), wanted)
    assert set(world.skipped) == {2, 5}
    with world.closing:
        require_equal(read(world.queued()), wanted)
        assert set(world.queue.skipped) == {2, 5}


# ---------------------------------------------------------------- a store that keeps


def test_a_store_of_another_cut_is_read_row_by_row(world: World) -> None:
    other = Plan(
        world.samples.feature_ids, world.samples.lengths.tolist(), batch=5, accumulate=1, seed=0
    )
    found = read(world.stored(other))
    store = FileStore(world.folder / "features")
    refs = store.lookup(world.samples.feature_ids)
    for one in found:
        with store.get(refs[one[1]]) as handle:
            assert torch.equal(handle.tensors[NAMES[0]], one[6][NAMES[0]])
    store.close()


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


# ---------------------------------------------------------------- the queue


def test_a_step_of_more_batches_than_are_held_goes_through(tmp_path: Path) -> None:
    """Nobody tells the queue of a step's end here: a batch makes room as soon as it is closed."""
    world = World(tmp_path, rows=24, accumulate=12, epochs=1)
    wanted = read(world.captured())
    with world.closing:
        require_equal(read(world.queued(producers=2, ahead=3)), wanted)


class Torn(ShmStore):
    """A ring of which a loader's first reads of some samples fail."""

    error: DraftcoreError
    failures = 3

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        self.failures -= 1
        if self.failures >= 0 and self.failures % 2 == 0:
            raise self.error
        return super().get_many(refs, device, names)


@pytest.mark.parametrize("error", [StoreError("torn"), StoreAway("not now")])
def test_what_is_torn_is_captured_again_and_a_store_that_is_away_is_waited_for(
    world: World, error: DraftcoreError
) -> None:
    wanted = read(world.captured())
    source = world.queued(open_store=Torn.open)
    assert isinstance(world.store, Torn)
    world.store.error = error
    require_equal(read(source), wanted)
    assert world.store.failures < 0
    assert not world.queue.skipped
    again = world.queue.status().captured - len(wanted)
    assert again == 0 if isinstance(error, StoreAway) else again > 0


def test_what_is_torn_in_a_store_that_keeps_is_captured_again(world: World) -> None:
    """Else every producer would publish it anew, and its rows be skipped in the end."""
    wanted = read(world.stored())
    world.store.close()
    (world.folder / "features").rename(world.folder / "ring")
    for shard in (world.folder / "ring").glob("shard-*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        break
    source = world.queued(open_store=FileStore.open, keeps=True)
    require_equal(read(source), wanted)
    assert not world.queue.skipped


class Away(ShmStore):
    """A ring that never answers a loader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked = threading.Event()

    def get_many(self, *args: Any, **kwargs: Any) -> tuple[Handle, ...]:
        self.asked.set()
        raise StoreAway("for hours")


def test_a_store_that_stays_away_ends_the_iteration(world: World) -> None:
    world.patience = 0.0
    batches = loader(world.queued(open_store=Away.open))
    with pytest.raises(StoreAway):
        next(batches)
    within(batches.close)


@pytest.mark.parametrize("kind", ["captured", "queued"])
def test_too_many_bad_rows_end_the_iteration_with_their_names(world: World, kind: str) -> None:
    world.capture = lambda: Mixing(bad=range(11))
    source = world.captured() if kind == "captured" else world.queued()
    world.skipped.most = 1
    batches = loader(source)
    with pytest.raises(DraftcoreError, match=r"\d rows cannot be trained on"):
        list(batches)
    within(batches.close)


def without(name: str) -> Change:
    return lambda ref: replace(ref, tensors=tuple(s for s in ref.tensors if s.name != name))


def features(**changes: Any) -> Change:
    def change(ref: SampleRef) -> SampleRef:
        (old,) = (spec for spec in ref.tensors if spec.name == NAMES[0])
        others = without(NAMES[0])(ref).tensors
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
def test_refs_that_do_not_fit_are_told_what_is_wrong(
    world: World, change: Change, said: str
) -> None:
    """Of one row that is odd, the others of its batch are good."""
    tasks = tasks_of(world.plan.uses(0), world.samples, world.plan, 24)
    task = next(one for one in tasks if one.batch.rows[1:] == (10,))  # which has 4 tokens
    assert task.nbytes == 24 * sum(map(len, task.batch.token_ids))
    store = FileStore(world.folder / "one")
    first, last = put_batch(task.batch, task.loss_masks, Mixing(), store, ORIGIN)
    store.close()

    def wrong(*refs: SampleRef) -> DraftcoreError | None:
        return ref_error(task, refs, world.forms, ORIGIN)

    assert wrong(first, last) is None
    assert said in str(found := wrong(first, change(last)))
    if "other samples" in said:
        assert said in str(wrong(first))
        assert said in str(wrong(last, first))
    else:
        assert isinstance(found, BadRows)
        assert list(found.reasons) == [1]


# ---------------------------------------------------------------- working ahead, and the end


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
            assert self.changed.wait_for(condition, SOON)


def within(work: Callable[[], Any]) -> None:
    """Do something that must not take for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_than_one_batch_beside_those_ahead_is_open(world: World, ahead: int) -> None:
    source = Counted(world)
    batches = loader(source, ahead)
    for number, _ in enumerate(batches, 1):
        left = len(list(world.plan.uses(0))) - number
        source.wait_for(lambda left=left: source.open == 1 + min(ahead, left))  # type: ignore[misc]
    assert source.most == ahead + 1
    assert source.open == 0
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


def test_batches_of_a_loader_that_does_not_work_ahead_are_read_in_the_thread_that_trains(
    world: World,
) -> None:
    source = Counted(world)
    threads = threading.active_count()
    batches = loader(source, 0)
    next(batches)
    assert (source.reads, threading.active_count()) == (1, threads)
    assert len(list(batches)) == len(list(world.plan.uses(0))) - 1
    batches.close()


def test_being_asked_to_stop_ends_the_iteration_while_it_waits(world: World) -> None:
    source, stop = Counted(world, waits_at=3), threading.Event()
    batches = Loader(source, ahead=2, device=CPU, stop=stop.is_set)
    seen = [next(batches).planned.position for _ in range(3)]
    source.wait_for(lambda: source.reads == 4)
    stop.set()
    within(lambda: seen.extend(batch.planned.position for batch in batches))
    assert seen == [0, 1, 2]
    within(batches.close)
    assert source.open == 0


class Stopped(Mixing):
    """One that heard, as it waited for a server, that the run is asked to stop."""

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        raise RunEnded("asked to stop", "interrupted")


def test_a_capture_that_was_asked_to_stop_ends_the_iteration(world: World) -> None:
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


@pytest.mark.parametrize("producers", [0, 1])
def test_closing_waits_neither_for_producers_nor_for_a_store_that_is_away(
    world: World, producers: int
) -> None:
    world.patience = 1e6
    source = world.queued(producers, open_store=Away.open)
    assert isinstance(world.store, Away)
    batches = loader(source)
    assert not producers or world.store.asked.wait(SOON)
    within(batches.close)
