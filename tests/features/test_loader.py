"""The loader: equal samples from every source, few of them open at once, and an end to every wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
)
from draftcore.contracts.channel import Json
from draftcore.contracts.store import (
    FeatureStore,
    SampleRef,
    StoreAway,
    StoreError,
    StoreItem,
)
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.features.hf import LocalCapture
from draftcore.features.loader import (
    Captured,
    Loaded,
    Loader,
    Queued,
    Source,
    Stored,
    misfit,
    tasks_of,
)
from draftcore.features.producer import produce, put_batch
from draftcore.features.queue import Queue, QueueService, RemoteQueue
from draftcore.features.stores.base import OpenHandle
from draftcore.features.stores.file import FileStore
from draftcore.target import TransformersTarget

SOON = 60.0  # seconds in which what must happen does, however slow the machine
NAMES, WIDTH, ORIGIN = ("hidden.1",), 2, "as always"
CPU = torch.device("cpu")


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


class Loopback:
    """A channel's client in the same process."""

    def __init__(self, queue: Queue) -> None:
        self.service = QueueService(queue)

    def call(self, request: Json) -> Json:
        reply: Json = json.loads(json.dumps(self.service.answer(json.loads(json.dumps(request)))))
        return reply

    def close(self) -> None: ...


class World:
    """A plan, and the sources that a run may have for it."""

    def __init__(
        self, folder: Path, rows: int = 11, *, skipped: Sequence[int] = (), **plan: Any
    ) -> None:
        self.folder, self.samples, self.names = folder, Rows(rows), NAMES
        settings = {"batch": 2, "accumulate": 2, "seed": 3, "epochs": 2, **plan}
        self.plan = Plan(self.samples.feature_ids, self.samples.lengths.tolist(), **settings)
        self.skipped = dict.fromkeys(skipped, "bad before")
        self.capture: Callable[[], Capture] = Mixing
        self.closing = ExitStack()

    def skips(self) -> Skipped:
        return Skipped(self.skipped, rows=len(self.samples.feature_ids), share=1)

    def captured(self) -> Captured:
        return Captured(self.capture(), self.samples, self.plan, self.skips())

    def stored(self, *, complete: bool, folder: str = "features") -> Stored:
        return Stored(
            FileStore(self.folder / folder), self.samples, self.plan, self.skips(), names=self.names,
            provenance=ORIGIN, complete=complete, keeps=True, open_capture=self.capture,
        )  # fmt: skip

    def fill(self, plan: Plan | None = None) -> None:
        """Capture all of a plan's batches into the store, as `draftcore capture` does."""
        store, capture = FileStore(self.folder / "features"), self.capture()
        for index, planned in enumerate((plan or self.plan).batches):
            rows = tuple(row for row in planned if row not in self.skipped)
            tokens = tuple(self.samples.tokens(row).tolist() for row in rows)
            ids = tuple(self.samples.feature_ids[row] for row in rows)
            masks = [self.samples.loss_mask(row).tolist() for row in rows]
            if rows:
                put_batch(CaptureBatch(index, rows, ids, tokens), masks, capture, store, ORIGIN)
        store.close()

    def queued(
        self,
        producers: int = 1,
        ahead: int = 3,
        open_store: Callable[[str], FeatureStore] = ShmStore.open,
    ) -> Queued:
        store = open_store(f"shm:{self.folder / 'ring'}?max_bytes=1MiB")
        self.closing.callback(store.close)
        queue = self.queue = Queue(
            {"store": store.uri}, ahead=ahead, limit=1 << 19, skipped=self.skips(), free=store.free,
            misfit=lambda task, refs: misfit(task, refs, self.names, (self.width, "float32"), ORIGIN),
        )  # fmt: skip
        queue.offer(tasks_of(self.plan.uses(0), self.samples, self.plan, 24), 0)
        ends = [RemoteQueue(Loopback(queue)) for _ in range(producers)]
        for end in ends:
            arguments = [end, self.capture(), ORIGIN, ShmStore.open, lambda: False, SOON]
            thread = threading.Thread(target=produce, args=arguments, daemon=True)
            thread.start()
            self.closing.callback(thread.join, SOON)
        self.closing.callback(queue.end, "finished")
        return Queued(queue, store, self.plan, self.names, SOON)

    width = WIDTH


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    with found.closing:
        yield found


def loader(world: World, source: Source, ahead: int = 2) -> Loader:
    return Loader(world.plan.uses(0), source, ahead=ahead, device=CPU, stop=lambda: False)


Read = list[tuple[int, str, int, str, list[int], list[bool], dict[str, Tensor]]]


def read(world: World, source: Source, ahead: int = 2) -> Read:
    """All that training sees of a run's samples, in order."""
    found: Read = []
    batches = loader(world, source, ahead)
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
    wanted = read(world, world.captured())
    assert len(wanted) == 2 * 11
    assert {one[3] for one in wanted} == {"torch.int64 torch.bool"}
    require_equal(read(world, world.stored(complete=False)), wanted)
    require_equal(read(world, world.stored(complete=True)), wanted)
    require_equal(read(world, world.queued(producers=3)), wanted)
    assert world.queue.status().nbytes > 0
    world.queue.advance(10**6)
    store = ShmStore.open(f"shm:{world.folder / 'ring'}")
    assert store.stats().samples == 0
    store.close()


def test_so_do_they_with_a_real_target(tmp_path: Path, target_folder: Path) -> None:
    """Padding and batch size change its last bits; the plan's batches do not differ."""
    world = World(tmp_path, rows=7, batch=3, accumulate=1, epochs=1)
    target = TransformersTarget(str(target_folder), device="cpu")
    request = FeatureRequest((1, 3), True, "float32")
    world.names, world.width = request.names, 48  # type: ignore[assignment]
    world.capture = lambda: LocalCapture(target, request)
    wanted = read(world, world.captured())
    assert set(wanted[0][6]) == {"hidden.1", "hidden.3", "last_hidden"}
    world.fill()
    require_equal(read(world, world.stored(complete=False)), wanted)
    require_equal(read(world, world.stored(complete=True)), wanted)
    with world.closing:
        require_equal(read(world, world.queued()), wanted)


@pytest.mark.parametrize("skipped", [[4], [0, 3, 7], list(range(11))])
def test_skipped_rows_are_left_out_in_every_source(tmp_path: Path, skipped: list[int]) -> None:
    """Also where a batch, or all of them, has none left."""
    world = World(tmp_path, skipped=skipped)
    wanted = read(world, world.captured())
    rows = {int(one[1], 16) for one in wanted}
    assert rows == set(range(11)) - set(skipped)
    require_equal(read(world, world.stored(complete=False)), wanted)
    require_equal(read(world, world.stored(complete=True)), wanted)
    with world.closing:
        require_equal(read(world, world.queued()), wanted)


@pytest.mark.parametrize("kind", [Mixing, Delivering])
def test_rows_that_turn_out_bad_are_left_out_in_every_source(
    tmp_path: Path, kind: type[Mixing]
) -> None:
    """The others of their batch are captured without them."""
    world = World(tmp_path, epochs=1)
    world.capture = lambda: kind(bad=[2, 5])
    wanted = read(world, source := world.captured())
    assert set(source.skipped) == {2, 5}
    assert len(wanted) == 9
    filling = world.stored(complete=False)
    require_equal(read(world, filling), wanted)
    assert set(filling.skipped) == {2, 5}
    with world.closing:
        require_equal(read(world, world.queued()), wanted)
        assert set(world.queue.skipped) == {2, 5}


def test_too_many_bad_rows_end_the_iteration_with_their_names(world: World) -> None:
    world.capture = lambda: Mixing(bad=range(11))
    source = world.captured()
    source.skipped.most = 2
    with pytest.raises(DraftcoreError, match=r"[34] rows cannot be trained on"):
        list(loader(world, source))


def test_a_feature_that_is_not_finite_makes_its_row_a_bad_one(world: World) -> None:
    class Broken(Mixing):
        def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
            for one in super().features(batches):
                for row, features in zip(one.batch.rows, one.features, strict=True):
                    if row == 6:
                        features[NAMES[0]][-1, 1] = torch.nan
                yield one

    world.capture = Broken
    wanted = read(world, source := world.captured())
    assert list(source.skipped) == [6]
    assert "row 6" in source.skipped[6]
    require_equal(read(world, world.queued()), wanted)


# ---------------------------------------------------------------- a store that keeps


def test_a_store_is_filled_once_and_goes_on_where_it_was_left(world: World) -> None:
    first = Mixing()
    world.capture = lambda: first
    batches = loader(world, world.stored(complete=False))
    for _ in range(3):
        next(batches)
    batches.close()
    assert len(first.captured) == 3
    assert first.closed == 1
    second = Mixing()
    world.capture = lambda: second
    wanted = read(world, world.captured())
    second.captured.clear()
    require_equal(read(world, world.stored(complete=False)), wanted)
    assert sorted(first.captured + second.captured) == list(range(len(world.plan.batches)))


def test_a_complete_store_needs_no_capture(world: World) -> None:
    world.fill()
    wanted = read(world, world.captured())

    def never() -> Capture:
        raise AssertionError

    world.capture = never
    require_equal(read(world, world.stored(complete=True)), wanted)
    require_equal(read(world, world.stored(complete=False)), wanted)


def test_a_complete_store_of_another_cut_is_read_row_by_row(world: World) -> None:
    other = Plan(
        world.samples.feature_ids, world.samples.lengths.tolist(), batch=5, accumulate=1, seed=0
    )
    world.fill(other)
    store = FileStore(world.folder / "features")
    refs = store.lookup(world.samples.feature_ids)
    for one in read(world, world.stored(complete=True)):
        with store.get(refs[one[1]]) as handle:
            assert torch.equal(handle.tensors[NAMES[0]], one[6][NAMES[0]])
    store.close()


@pytest.mark.parametrize("complete", [False, True])
def test_a_torn_sample_is_captured_again_or_named(world: World, complete: bool) -> None:
    """A complete store is not written to: it may be another's."""
    world.fill()
    wanted = read(world, world.captured())
    shard = sorted((world.folder / "features").glob("shard-*.safetensors"))[2]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    if complete:
        with pytest.raises(StoreError, match="sample '0"):
            read(world, world.stored(complete=True))
        assert shard.read_bytes() == data
    else:
        require_equal(read(world, world.stored(complete=False)), wanted)
        require_equal(read(world, world.stored(complete=True)), wanted)


def test_a_sample_that_a_complete_store_lacks_is_named_with_a_remedy(world: World) -> None:
    world.fill()
    store = FileStore(world.folder / "features")
    store.free(store.lookup(world.samples.feature_ids[4:5]).values())
    store.close()
    with pytest.raises(DraftcoreError, match=r"missing from the store file:.*\n  run `draftcore"):
        read(world, world.stored(complete=True))


def test_what_could_not_be_written_is_an_error_of_the_next_batch(world: World) -> None:
    source = world.stored(complete=False)

    def refuse(items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        raise DraftcoreError("the disk is full")

    source.store.put_many = refuse  # type: ignore[method-assign]
    batches = loader(world, source)
    next(batches)
    with pytest.raises(DraftcoreError, match="the disk is full"):
        next(batches)
    batches.close()


# ---------------------------------------------------------------- the queue


def test_a_step_of_more_batches_than_are_held_goes_through(tmp_path: Path) -> None:
    """Nobody tells the queue of a step's end here: a batch makes room as soon as it is closed."""
    world = World(tmp_path, rows=24, accumulate=12, epochs=1)
    wanted = read(world, world.captured())
    with world.closing:
        require_equal(read(world, world.queued(producers=2, ahead=3)), wanted)


def test_two_ranks_read_each_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, rows=13, accumulate=3)
    wanted = read(world, world.captured())
    with world.closing:
        own = world.queued(producers=2, ahead=6)
        far = Queued(RemoteQueue(Loopback(world.queue)), own.store, world.plan, NAMES, SOON)
        found: dict[int, list[int]] = {0: [], 1: []}

        def train(rank: int, source: Queued) -> None:
            uses = world.plan.uses(0, rank, 2)
            batches = Loader(uses, source, ahead=2, device=CPU, stop=lambda: False)
            found[rank] += [batch.planned.position for batch in batches for _ in batch.samples]
            batches.close()

        threads = [threading.Thread(target=train, args=one) for one in ((0, own), (1, far))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert sorted(found[0] + found[1]) == [one[0] for one in wanted]
    assert all(list(ours) == sorted(ours) for ours in found.values())
    assert found[0] == [use.position for use in world.plan.uses(0, 0, 2) for _ in use.rows]


class Torn(ShmStore):
    """A ring of which a loader's first reads of some samples fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures = 3
        self.error: DraftcoreError = StoreError("torn")

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[OpenHandle, ...]:
        self.failures -= 1
        if self.failures >= 0 and self.failures % 2 == 0:
            raise self.error
        return super().get_many(refs, device, names)


def test_torn_refs_are_rejected_and_captured_again(world: World) -> None:
    wanted = read(world, world.captured())
    source = world.queued(open_store=Torn.open)
    assert isinstance(source.store, Torn)
    require_equal(read(world, source), wanted)
    assert source.store.failures < 0
    assert not world.queue.skipped
    assert world.queue.status().captured > len(wanted)


def test_a_store_that_is_away_for_a_while_is_waited_for(world: World) -> None:
    """Nothing is captured again: what it holds is not lost."""
    wanted = read(world, world.captured())
    source = world.queued(open_store=Torn.open)
    assert isinstance(source.store, Torn)
    source.store.error = StoreAway("not now")
    require_equal(read(world, source), wanted)
    assert source.store.failures < 0
    assert world.queue.status().captured == len(wanted)


def test_a_store_that_stays_away_ends_the_iteration(world: World) -> None:
    source = world.queued(open_store=Torn.open)
    assert isinstance(source.store, Torn)
    source.store.error, source.store.failures, source.patience = (
        StoreAway("not now"),
        10**6 + 1,
        0.0,
    )
    source.store.get_many = raiser(source.store.error)  # type: ignore[method-assign]
    batches = loader(world, source)
    with pytest.raises(StoreAway):
        next(batches)
    within(batches.close)


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_the_queues_failure_ends_the_iteration_with_its_reason(world: World) -> None:
    world.capture = lambda: Mixing(bad=range(11))
    source = world.queued()
    world.queue.skipped.most = 1
    batches = loader(world, source)
    with pytest.raises(DraftcoreError, match="rows cannot be trained on"):
        list(batches)
    within(batches.close)


def example(world: World) -> tuple[Any, tuple[SampleRef, ...]]:
    """A task, and refs that fit it."""
    tasks = tasks_of(world.plan.uses(0), world.samples, world.plan, 24)
    task = next(task for task in tasks if len(task.batch.rows) == 2)
    store = FileStore(world.folder / "one")
    refs = put_batch(task.batch, task.loss_masks, Mixing(), store, ORIGIN)
    store.close()
    return task, refs


def test_refs_that_fit_have_nothing_wrong(world: World) -> None:
    task, refs = example(world)
    assert misfit(task, refs, NAMES, (WIDTH, "float32"), ORIGIN) == ""
    assert task.nbytes == 24 * sum(map(len, task.batch.token_ids))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("order", "refs of other samples"),
        ("missing", "refs of other samples"),
        ("origin", "was captured as"),
        ("lacks", "lacks hidden.1"),
        ("no text", "lacks loss_mask"),
        ("short", "chunked prefill or a prefix cache"),
        ("width", "not of"),
        ("dtype", "not of"),
    ],
)
def test_refs_that_do_not_fit_are_told_what_is_wrong(world: World, way: str, said: str) -> None:
    task, refs = example(world)
    last = refs[-1]
    specs = {spec.name: spec for spec in last.tensors}
    hidden = specs["hidden.1"]
    match way:
        case "order":
            refs = refs[::-1]
        case "missing":
            refs = refs[:-1]
        case "origin":
            refs = (*refs[:-1], replace(last, provenance="another"))
        case "lacks":
            specs.pop("hidden.1")
        case "no text":
            specs.pop("loss_mask")
        case "short":
            specs["hidden.1"] = replace(hidden, shape=(hidden.shape[0] - 1, WIDTH))
        case "width":
            specs["hidden.1"] = replace(hidden, shape=(hidden.shape[0], WIDTH + 1))
        case "dtype":
            specs["hidden.1"] = replace(hidden, dtype="bfloat16")
    if way in ("lacks", "no text", "short", "width", "dtype"):
        refs = (*refs[:-1], replace(last, tensors=tuple(specs.values())))
    assert said in misfit(task, refs, NAMES, (WIDTH, "float32"), ORIGIN)


# ---------------------------------------------------------------- working ahead, and the end


class Counted:
    """A source that counts what is open, and may wait or fail at a position."""

    captures = False

    def __init__(self, *, waits_at: int = -1, fails_at: int = -1) -> None:
        self.waits_at, self.fails_at = waits_at, fails_at
        self.open = self.most = self.reads = self.closed = 0
        self.changed = threading.Condition()

    def read(self, planned: PlannedBatch, stop: Callable[[], bool]) -> Loaded | None:
        with self.changed:
            self.reads += 1
            self.changed.notify_all()
            if planned.position == self.waits_at:
                while not stop():
                    self.changed.wait(0.01)
                return None
            if planned.position == self.fails_at:
                raise DraftcoreError("this one is broken")
            self.open += 1
            self.most = max(self.most, self.open)
            self.changed.notify_all()
        found = Loaded(planned, [])
        found.handles.callback(self.let_go)
        return found

    def let_go(self) -> None:
        with self.changed:
            self.open -= 1
            self.changed.notify_all()

    def close(self) -> None:
        self.closed += 1

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
    source = Counted()
    batches = loader(world, source, ahead)
    for number, _ in enumerate(batches, 1):
        left = len(list(world.plan.uses(0))) - number
        source.wait_for(lambda left=left: source.open == 1 + min(ahead, left))  # type: ignore[misc]
    assert source.most == ahead + 1
    assert source.open == 0
    within(batches.close)
    assert source.closed == 1


def test_a_batch_is_closed_when_the_next_is_asked_for_or_when_it_is_let_go(world: World) -> None:
    source = Counted()
    batches = loader(world, source, 1)
    next(batches)
    source.wait_for(lambda: source.open == 2)
    batches.let_go()
    batches.let_go()
    assert source.open == 1
    next(batches)
    source.wait_for(lambda: source.open == 2)
    within(batches.close)
    assert source.open == 0


def test_a_source_that_captures_here_works_in_the_thread_that_trains(world: World) -> None:
    source = Counted()
    source.captures = True
    threads = threading.active_count()
    batches = loader(world, source, 5)
    next(batches)
    assert (source.reads, threading.active_count()) == (1, threads)
    assert len(list(batches)) == len(list(world.plan.uses(0))) - 1
    batches.close()


def test_being_asked_to_stop_ends_the_iteration_while_it_waits(world: World) -> None:
    source, stop = Counted(waits_at=3), threading.Event()
    batches = Loader(world.plan.uses(0), source, ahead=2, device=CPU, stop=stop.is_set)
    seen = [next(batches).planned.position for _ in range(3)]
    source.wait_for(lambda: source.reads == 4)
    stop.set()
    within(lambda: seen.extend(batch.planned.position for batch in batches))
    assert seen == [0, 1, 2]
    within(batches.close)
    assert source.open == 0


def test_an_error_of_the_thread_is_raised_where_its_batch_is_asked_for(world: World) -> None:
    source = Counted(fails_at=2)
    batches = loader(world, source, 5)
    assert [next(batches).planned.position for _ in range(2)] == [0, 1]
    with pytest.raises(DraftcoreError, match="this one is broken"):
        next(batches)
    within(batches.close)
    assert source.open == 0


@pytest.mark.parametrize("state", ["full", "waiting", "failed", "ended", "untouched"])
def test_closing_never_hangs_and_leaves_nothing_open(world: World, state: str) -> None:
    kinds = {"waiting": Counted(waits_at=1), "failed": Counted(fails_at=1)}
    source = kinds.get(state, Counted())
    batches = loader(world, source, 2)
    if state == "full":
        next(batches)
        source.wait_for(lambda: source.open == 3)
    elif state == "waiting" or state == "failed":
        source.wait_for(lambda: source.reads == 2)
    elif state == "ended":
        assert len(list(batches)) == len(list(world.plan.uses(0)))
    within(batches.close)
    assert source.open == 0
    assert source.closed == 1


def test_closing_does_not_wait_for_a_store_that_is_away(world: World) -> None:
    source = world.queued(open_store=Torn.open)
    reached = threading.Event()

    def away(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        raise StoreAway("for hours")

    source.store.get_many = away  # type: ignore[method-assign]
    source.patience = 1e6
    batches = loader(world, source)
    assert reached.wait(SOON)
    within(batches.close)


def test_closing_does_not_wait_for_producers(world: World) -> None:
    batches = loader(world, world.queued(producers=0))
    within(batches.close)
