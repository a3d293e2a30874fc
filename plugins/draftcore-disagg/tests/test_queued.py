"""Batches that producers capture: the samples that a rank with a capture of its own trains on, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from draftcore_disagg.producer import produce
from draftcore_disagg.queue import Queue, RemoteQueue
from draftcore_disagg.queued import queued, tasks_of
from draftcore_file.store import FileStore
from queueing import Loopback

from draftcore.contracts.run import Needed, Ranks
from draftcore.contracts.store import FeatureStore, Handle, StoreAway, StoreError
from draftcore.errors import DraftcoreError
from draftcore.run import Run
from draftcore.run.features import Features
from draftcore.run.train import TrainerParts
from tests.features.world import (
    ORIGIN,
    SOON,
    Batches,
    Delivering,
    Far,
    Infinite,
    Mixing,
    loader,
    read,
    require_equal,
    within,
)
from tests.features.world import World as Here


class World(Here):
    """The same plan, and producers that work for it in threads."""

    patience = SOON

    def needed(self, store: FeatureStore | None = None, keeps: bool = False) -> Needed:
        """What a trainer needs whose drafts have made no step."""
        features = Features(self.request, ORIGIN, None, store, keeps)
        run = cast(Run, SimpleNamespace(width=self.width, ranks=Ranks()))
        parts = TrainerParts(run, features, self.samples, self.plan, self.skipped, prefetch=2)
        parts.trainers.append(cast(Any, SimpleNamespace(step=0)))
        return parts.needed()

    def queued(
        self,
        producers: int = 1,
        ahead: int = 3,
        open_store: Callable[[str], FeatureStore] = FileStore.open,
        keeps: bool = False,
    ) -> Batches:
        place = "file:{}" if keeps else "file:{}?volatile=yes&max_bytes=1MiB"
        self.store = store = open_store(place.format(self.folder / "ring"))
        self.closing.callback(store.close)
        self.skipped = self.skips()
        needed = self.needed(store, keeps)
        queue = self.queue = Queue(
            {"store": store.uri}, ahead=ahead, limit=1 << 19, skipped=self.skipped,
            free=(lambda refs: None) if keeps else store.free, ref_error=needed.ref_error,
        )  # fmt: skip
        queue.offer(tasks_of(needed), 0)
        for _ in range(producers):
            end, opens = RemoteQueue(Loopback(queue)), FileStore.open
            arguments = [end, lambda about: (self.checked(), ORIGIN), opens, lambda: False, SOON]
            thread = threading.Thread(target=produce, args=arguments, daemon=True)
            thread.start()
            self.closing.callback(thread.join, SOON)
        self.closing.callback(queue.end, "finished")
        return queued(needed, 0, 1, queue, store, self.patience)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    with found.closing:
        yield found


def test_a_queue_gives_the_samples_of_a_capture_to_the_bit_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """In steps of more batches than are held.

    Nobody tells the queue of a step's end here: a batch makes room as soon as it is closed.
    """
    world = World(tmp_path, rows=24, accumulate=12)
    wanted = read(world.captured())
    with world.closing:
        require_equal(read(world.queued(producers=3)), wanted)
        assert world.queue.status().nbytes > 0
        world.queue.advance(10**6)
        assert world.store.stats().samples == 0


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        *((Mixing, skipped) for skipped in ([4], [0, 3, 7], range(11))),
        *((kind, []) for kind in (Infinite, Delivering, Far)),
    ],
)
def test_rows_that_were_skipped_or_turn_out_bad_are_left_out(
    tmp_path: Path, kind: type[Mixing], skipped: Sequence[int]
) -> None:
    """The others of their batch are captured without them; also where it, or all, have none left."""
    world = World(tmp_path, skipped=skipped, epochs=1)
    world.capture = lambda: kind(bad=[2, 5])
    wanted = read(world.captured())
    with world.closing:
        require_equal(read(world.queued()), wanted)
        assert set(world.skipped) == {2, 5, *skipped}


def test_a_task_says_what_its_features_take_with_their_text(world: World) -> None:
    """Two numbers of four bytes per token, a token id of eight and a mask of one."""
    for task in tasks_of(world.needed()):
        assert task.nbytes == (2 * 4 + 8 + 1) * sum(map(len, task.batch.token_ids))


# ---------------------------------------------------------------- misfortune


class Torn(FileStore):
    """A ring of which some of a loader's reads fail, by default all."""

    error: DraftcoreError = StoreAway("for hours")
    failing: Container[int] = range(10**9)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads, self.asked = 0, threading.Event()

    def get_many(self, *args: Any, **kwargs: Any) -> tuple[Handle, ...]:
        self.asked.set()
        self.reads += 1
        if self.reads in self.failing:
            raise self.error
        return super().get_many(*args, **kwargs)


@pytest.mark.parametrize("error", [StoreError("torn"), StoreAway("not now")])
def test_what_is_torn_is_captured_again_and_a_store_that_is_away_is_waited_for(
    world: World, error: DraftcoreError
) -> None:
    wanted = read(world.captured())
    source = world.queued(open_store=Torn.open)
    assert isinstance(world.store, Torn)
    world.store.error, world.store.failing = error, {1, 3}
    require_equal(read(source), wanted)
    assert world.store.reads > 3
    assert not world.skipped
    again = world.queue.status().captured - len(wanted)
    assert again == 0 if isinstance(error, StoreAway) else again > 0


def test_what_is_torn_in_a_store_that_keeps_is_captured_again(world: World) -> None:
    """Else every producer would publish it anew, and its rows be skipped in the end."""
    wanted = read(world.stored())
    world.store.close()
    (world.folder / "features").rename(world.folder / "ring")
    shard = next((world.folder / "ring").glob("shard-*.safetensors"))
    shard.write_bytes((data := shard.read_bytes())[:-1] + bytes([data[-1] ^ 1]))
    source = world.queued(open_store=FileStore.open, keeps=True)
    require_equal(read(source), wanted)
    assert not world.skipped


@pytest.mark.parametrize("patience", [0.0, 1e6])
@pytest.mark.parametrize("producers", [0, 1])
def test_a_store_that_stays_away_ends_the_iteration_and_closing_waits_for_nobody(
    world: World, producers: int, patience: float
) -> None:
    world.patience = patience
    source = world.queued(producers, open_store=Torn.open)
    assert isinstance(world.store, Torn)
    batches = loader(source)
    assert not producers or world.store.asked.wait(SOON)
    if producers and not patience:
        with pytest.raises(StoreAway):
            next(batches)
    within(batches.close)
