"""What every channel must do. See `draftcore_sdk` for how to use it.

A channel is tried with a real queue behind it, as a run's producers use it. A subclass sets `plugin`,
`impatient`, and the fixture `channel_uri` where a channel needs more than a folder.
"""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftcore.contracts.capture import BadRows, CaptureBatch
from draftcore.contracts.channel import Channel, ChannelAway, Client, Json, RunEnded, Task
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError
from draftcore.features import queue as core
from draftcore.features.queue import Queue, QueueService, RemoteQueue
from draftcore_sdk.suite import Suite, child_environment, hooks_of, offer_of, options_of

SOON = 60.0  # seconds within which it comes on a busy machine
LONG = 4 * SOON  # seconds that a request waits for what comes before
SECRET, OTHER = b"what both ends know", b"what a stranger knows"
Begin = Callable[..., "Trainer"]
Join = Callable[..., RemoteQueue]


class Trainer:
    """The trainer's end: a queue behind a channel, and what the channel has asked of it."""

    def __init__(self, channel: Channel, ttl: float) -> None:
        self.channel, self.heard, self.freed = channel, list[Json](), list[SampleRef]()
        self.queue = Queue(
            {"store": "test:"},
            ahead=10**6,
            limit=None,
            skipped=Skipped({}, rows=100, share=1.0),
            free=self.freed.extend,
            misfit=lambda task, refs: "",
            ttl=ttl,
        )
        self.service = QueueService(self.queue)
        self.address = channel.serve(self)

    def answer(self, request: Json) -> Json:
        self.heard.append(request)
        return self.service.answer(request)

    def lost(self, producer: str) -> None:
        self.service.lost(producer)

    def offer(self, tasks: Iterable[Task]) -> None:
        self.queue.offer(iter(tasks), 0)

    def hears(self, call: str, producer: str) -> None:
        """Wait until a producer's call is being answered."""
        eventually(lambda: any((r["call"], r["producer"]) == (call, producer) for r in self.heard))


class ChannelSuite(Suite):
    """The behaviour of a channel, opened through its plugin."""

    # ------------------------------------------------------------ what a subclass says

    @pytest.fixture
    def channel_uri(self, tmp_path: Path) -> str:
        """The URI of a fresh channel; by default in a fresh folder, or its bare name if it has none."""
        name = offer_of(self.plugin, "channel", self.name).name
        uri = f"{name}:{tmp_path / 'channel'}"
        try:
            open_through(self.plugin, uri, self.options, SECRET).close()
        except UsageError:
            return name
        return uri

    def impatient(self, uri: str, secret: bytes, patience: float) -> Channel:
        """Open the channel with a patience of this many seconds."""
        raise NotImplementedError("override impatient: clients must give up after a while")

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def open_channel(self, channel_uri: str) -> Iterator[Callable[[bytes], Channel]]:
        """Open the channel any number of times; all are closed at the end."""
        opened: list[Channel] = []

        def opener(secret: bytes = SECRET) -> Channel:
            opened.append(open_through(self.plugin, channel_uri, self.options, secret))
            return opened[-1]

        yield opener
        for channel in opened:
            channel.close()

    @pytest.fixture
    def begin(self, open_channel: Callable[[], Channel]) -> Iterator[Begin]:
        """Begin a trainer; its queue is ended at the end, so that no request waits on."""
        trainers: list[Trainer] = []

        def begin(ttl: float = 10 * SOON) -> Trainer:
            trainers.append(Trainer(open_channel(), ttl))
            return trainers[-1]

        yield begin
        for trainer in trainers:
            trainer.queue.end("failed")

    @pytest.fixture
    def trainer(self, begin: Begin) -> Trainer:
        return begin()

    @pytest.fixture
    def connect(self, open_channel: Callable[..., Channel]) -> Iterator[Callable[..., Client]]:
        """Connect a client; all are closed at the end."""
        clients: list[Client] = []

        def connect(find: Callable[[], str], secret: bytes = SECRET) -> Client:
            clients.append(open_channel(secret).connect(find))
            return clients[-1]

        yield connect
        for client in clients:
            client.close()

    @pytest.fixture
    def join(self, connect: Callable[..., Client]) -> Join:
        """Join a trainer as a producer of its own."""

        def join(trainer: Trainer, secret: bytes = SECRET) -> RemoteQueue:
            return RemoteQueue(connect(lambda: trainer.address, secret))

        return join

    @pytest.fixture
    def long_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let one request wait for longer than it takes until it is answered."""
        monkeypatch.setattr(core, "LONGEST_WAIT", LONG)

    # ------------------------------------------------------------ tasks and refs

    def test_tasks_come_in_the_order_offered_and_whole(self, trainer: Trainer, join: Join) -> None:
        producer, tasks = join(trainer), [task(at, rows=1 + at % 3) for at in range(6)]
        trainer.offer(tasks)
        found, store = producer.claim(4, 0)
        assert [dataclasses.replace(one, claim="") for one in found] == tasks[:4]
        assert store == "test:"
        assert [one.position for one in join(trainer).claim(4, 0)[0]] == [4, 5]

    def test_refs_are_received_as_they_were_published(self, trainer: Trainer, join: Join) -> None:
        producer, loader = join(trainer), join(trainer)
        trainer.offer([task(0, rows=3)])
        ((claimed,), _) = producer.claim(1, 0)
        assert loader.receive(0, 0) is None
        assert producer.publish(claimed.claim, refs_of(claimed))
        assert trainer.queue.receive(0, 0) == refs_of(claimed)
        assert loader.receive(0, 0) == refs_of(claimed)

    def test_a_failure_arrives_with_its_rows(self, trainer: Trainer, join: Join) -> None:
        producer = join(trainer)
        trainer.offer([task(0, rows=3)])
        ((claimed,), _) = producer.claim(1, 0)
        assert producer.publish(claimed.claim, BadRows({1: "wörds are lost"}))
        assert trainer.queue.skipped == {claimed.batch.rows[1]: "wörds are lost"}

    def test_a_late_publication_is_told_that_it_is_late(self, trainer: Trainer, join: Join) -> None:
        producer = join(trainer)
        trainer.offer([task(0)])
        ((claimed,), _) = producer.claim(1, 0)
        trainer.queue.leave(producer.producer)
        assert not producer.publish(claimed.claim, refs_of(claimed))
        assert trainer.freed == list(refs_of(claimed))

    def test_large_requests_and_replies_pass(self, trainer: Trainer, join: Join) -> None:
        producer, large = join(trainer), [task(at, rows=8, tokens=4000) for at in range(16)]
        trainer.offer(large)
        found, _ = producer.claim(16, 0)
        assert [dataclasses.replace(one, claim="") for one in found] == large
        refs = refs_of(found[0], provenance="p" * 100_000)
        assert producer.publish(found[0].claim, refs)
        assert producer.receive(0, 0) == refs

    def test_a_tensor_is_refused_where_it_is_serialised(self, trainer: Trainer, join: Join) -> None:
        import torch  # 1.6 s, which the processes that tests start do not pay

        producer = join(trainer)
        with pytest.raises(DraftcoreError, match=r"(?s)no.* plain JSON.*tensors travel through"):
            producer.client.call({"call": "about", "producer": "x", "given": torch.ones(2)})
        assert producer.about() == {"store": "test:"}
        assert len(trainer.heard) == 1

    # ------------------------------------------------------------ waiting

    @pytest.mark.usefixtures("long_waits")
    def test_a_claim_waits_for_an_offer_and_no_longer(self, trainer: Trainer, join: Join) -> None:
        producer = join(trainer)
        waiting = aside(producer.claim, 1, LONG)
        trainer.hears("claim", producer.producer)
        trainer.offer([task(0)])
        assert [one.position for one in waiting.result(SOON)[0]] == [0]

    @pytest.mark.usefixtures("long_waits")
    def test_who_waits_holds_nobody_up(self, trainer: Trainer, join: Join) -> None:
        waiting = [(one, aside(one.claim, 1, LONG)) for one in (join(trainer) for _ in range(3))]
        for one, _ in waiting:
            trainer.hears("claim", one.producer)
        assert aside(join(trainer).about).result(SOON) == {"store": "test:"}
        assert not any(future.done() for _, future in waiting)

    @pytest.mark.usefixtures("long_waits")
    def test_a_client_that_closes_ends_its_own_call(self, trainer: Trainer, join: Join) -> None:
        producer = join(trainer)
        waiting = aside(producer.claim, 1, LONG)
        trainer.hears("claim", producer.producer)
        producer.client.close()
        with pytest.raises(ChannelAway):
            waiting.result(SOON)

    @pytest.mark.usefixtures("long_waits")
    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_a_producer_hears_at_once_that_the_run_is_over(
        self, trainer: Trainer, join: Join, state: str
    ) -> None:
        producer = join(trainer)
        waiting = aside(producer.claim, 1, LONG)
        trainer.hears("claim", producer.producer)
        trainer.queue.end(state)
        with pytest.raises(RunEnded) as caught:
            waiting.result(SOON)
        assert caught.value.state == state

    # ------------------------------------------------------------ producers that come and go

    def test_a_heartbeat_is_heard(self, begin: Begin, join: Join) -> None:
        """The clock is turned instead of waited for: each turn is most of the time to live."""
        trainer = begin(ttl=1000)
        producer, other = join(trainer), join(trainer)
        trainer.offer([task(0)])
        assert producer.claim(1, 0)[0]
        for _ in range(3):
            trainer.queue.seen[producer.producer] -= 600
            producer.heartbeat()
        assert other.claim(1, 0)[0] == []

    def test_a_client_that_closes_returns_its_claims(self, trainer: Trainer, join: Join) -> None:
        producer, other = join(trainer), join(trainer)
        trainer.offer([task(0)])
        assert producer.claim(1, 0)[0]
        assert other.claim(1, 0)[0] == []
        producer.client.close()
        eventually(lambda: other.claim(1, 1)[0])

    def test_a_killed_producer_loses_its_claims(
        self, begin: Begin, join: Join, channel_uri: str
    ) -> None:
        trainer = begin(ttl=1)
        trainer.offer([task(0)])
        opening = self.plugin, channel_uri, json.dumps(dict(self.options)), trainer.address
        program = (
            f"import sys; from {__name__} import claim_and_stay; claim_and_stay(*sys.argv[1:])"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", program, *opening],
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"[0]\n"
        finally:
            child.kill()
            child.communicate()
        other = join(trainer)
        eventually(lambda: other.claim(1, 1)[0])

    def test_every_task_is_done_once_by_several_producers(
        self, trainer: Trainer, join: Join
    ) -> None:
        trainer.offer([task(at) for at in range(24)])

        def work(producer: RemoteQueue) -> list[int]:
            done = list[int]()
            while len(done) < 24 and (tasks := producer.claim(1, 0)[0]):
                assert producer.publish(tasks[0].claim, refs_of(tasks[0]))
                done.append(tasks[0].position)
            return done

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(work, [join(trainer) for _ in range(4)]))
        assert sorted(at for some in done for at in some) == list(range(24))
        for at in range(24):
            assert trainer.queue.receive(at, 0) == refs_of(task(at))

    def test_threads_of_one_client_get_their_own_replies(
        self, trainer: Trainer, join: Join
    ) -> None:
        producer = join(trainer)
        trainer.offer([task(at) for at in range(8)])
        for one in producer.claim(8, 0)[0]:
            assert producer.publish(one.claim, refs_of(one))
        with ThreadPoolExecutor(4) as pool:
            asked = [at % 8 for at in range(40)]
            found = list(pool.map(lambda at: producer.receive(at, 0), asked))
        assert found == [refs_of(task(at)) for at in asked]

    # ------------------------------------------------------------ trainers that come and go

    def test_a_producer_may_begin_before_its_trainer(
        self, begin: Begin, connect: Callable[..., Client]
    ) -> None:
        looked, address = threading.Event(), ""

        def find() -> str:
            looked.set()
            return address

        asked = aside(RemoteQueue(connect(find)).about)
        assert looked.wait(SOON)
        address = begin().address
        assert asked.result(SOON) == {"store": "test:"}

    @pytest.mark.usefixtures("long_waits")
    def test_a_producer_goes_on_with_the_next_trainer(
        self, begin: Begin, connect: Callable[..., Client]
    ) -> None:
        """A call that the old one was to answer is answered by the new one, like all after it."""
        trainers = [begin()]
        producer = RemoteQueue(connect(lambda: trainers[-1].address))
        waiting = aside(producer.claim, 1, LONG)
        trainers[0].hears("claim", producer.producer)
        trainers[0].channel.close()
        trainers.append(begin())
        trainers[0].queue.end("failed")
        trainers[1].offer([task(0)])
        (claimed,) = waiting.result(SOON)[0]
        assert producer.publish(claimed.claim, refs_of(claimed))
        assert trainers[1].queue.receive(0, 0) == refs_of(task(0))

    def test_a_client_waits_for_its_trainer_and_then_gives_up(
        self, begin: Begin, channel_uri: str
    ) -> None:
        trainer = begin()
        channel = self.impatient(channel_uri, SECRET, 1.0)
        client = channel.connect(lambda: trainer.address)
        assert RemoteQueue(client).about() == {"store": "test:"}
        trainer.channel.close()
        began = time.monotonic()
        with pytest.raises(ChannelAway, match=r"did not answer for 1 s"):
            client.call({"call": "about", "producer": "x"})
        assert time.monotonic() - began > 1
        client.close()
        channel.close()

    # ------------------------------------------------------------ strangers

    def test_another_secret_is_refused_and_harms_nobody(self, trainer: Trainer, join: Join) -> None:
        stranger, producer = join(trainer, OTHER), join(trainer)
        trainer.offer([task(at) for at in range(8)])

        def work() -> None:
            for at in range(8):
                (claimed,) = producer.claim(1, 0)[0]
                assert producer.publish(claimed.claim, refs_of(claimed))
                assert trainer.queue.receive(at, 0) == refs_of(task(at))

        refused = aside(stranger.leave)
        aside(work).result(SOON)
        assert not refused.done()
        stranger.client.close()
        with pytest.raises(ChannelAway):
            refused.result(SOON)
        assert aside(join(trainer).about).result(SOON) == {"store": "test:"}
        assert stranger.producer not in {request["producer"] for request in trainer.heard}


# ---------------------------------------------------------------- pieces of the tests


def open_through(plugin: str, uri: str, data: Mapping[str, Any], secret: bytes) -> Channel:
    """Open a channel through its plugin's hook, as a run does."""
    name = uri.partition(":")[0]
    options = options_of(offer_of(plugin, "channel", name), data)
    channel = hooks_of(plugin).channel(name=name, uri=uri, secret=secret, options=options)
    assert channel is not None, f"{plugin} answers None to channel(name={name!r})"
    return channel


def aside(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call something in a thread, which ends with the queue or client that it waits for."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def task(position: int, rows: int = 1, tokens: int = 5) -> Task:
    numbers = tuple(position * 10 + at for at in range(rows))
    token_ids: list[Sequence[int]] = [[n, *range(1, tokens + at)] for at, n in enumerate(numbers)]
    batch = CaptureBatch(position, numbers, tuple(f"s{n}" for n in numbers), tuple(token_ids))
    masks = tuple([at % 3 == 0 for at in range(len(ids))] for ids in token_ids)
    return Task(position, batch, masks, nbytes=1000)


def refs_of(task: Task, provenance: str = "") -> tuple[SampleRef, ...]:
    specs = (TensorSpec("x", (5, 100), "bfloat16"),)
    return tuple(SampleRef(one, "1", "test:", specs, 5, 1000, provenance) for one in task.batch.ids)


def claim_and_stay(plugin: str, uri: str, options: str, address: str) -> None:
    """Be another process, which claims a task and does no more."""
    client = open_through(plugin, uri, json.loads(options), SECRET).connect(lambda: address)
    tasks, _ = RemoteQueue(client).claim(1, 0)
    print([one.position for one in tasks], flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
