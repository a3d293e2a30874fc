"""What every channel must do. See `draftcore_sdk` for how to use it.

A channel is tried with a real queue behind it, as a run's producers use it. A subclass sets `plugin`,
and the fixture `channel_uri` where a channel needs more than a folder.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from draftcore_disagg import queue as core
from draftcore_disagg.channel import PATIENCE, Channel, ChannelAway, Json, Task
from draftcore_disagg.queue import Queue, QueueService, RemoteQueue

from draftcore.contracts.capture import BadRows, CaptureBatch
from draftcore.contracts.run import RunEnded
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.internals import Skipped
from draftcore_sdk.limits import SOON, until
from draftcore_sdk.suite import Suite, child_environment, offer_of, opened

LONG = 3600.0  # seconds that a request waits for what comes before
PATIENT = 5.0  # seconds that a producer waits for a trainer that is gone
SECRET, OTHER = b"what both ends of this run know: 1", b"what both ends of this run know: 2"
REASON = "wörds are lost\n  再 🙂 \\ \u2028"  # as people write, and other lines may end


class Trainer:
    """The trainer's end: a queue behind a channel, and what the channel has asked of it."""

    def __init__(self, channel: Channel, ttl: float) -> None:
        self.channel, self.heard, self.freed = channel, list[Json](), list[SampleRef]()
        self.skipped = Skipped({}, rows=100, share=1.0)
        self.queue = Queue(
            {"store": "test:"}, ahead=10**6, limit=None, skipped=self.skipped,
            free=self.freed.extend, ref_error=lambda task, refs: None, ttl=ttl,
        )  # fmt: skip
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
        until(lambda: any((r["call"], r["producer"]) == (call, producer) for r in self.heard))


class Ends:
    """Both ends of channels under test, as many as asked for; `stack` closes them."""

    def __init__(self, suite: "ChannelSuite", uri: str, stack: ExitStack) -> None:
        self.suite, self.uri, self.stack = suite, uri, stack

    def channel(self, secret: bytes = SECRET, patience: float = PATIENCE) -> Channel:
        channel = open_through(self.suite.plugin, self.uri, self.suite.options, secret, patience)
        self.stack.callback(channel.close)
        return channel

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer of tests that need no more than one."""
        return self.begin()

    def begin(self, ttl: float = LONG) -> Trainer:
        """Begin a trainer; its queue is ended at the end, so that no request waits on."""
        trainer = Trainer(self.channel(), ttl)
        self.stack.callback(trainer.queue.end, "failed")
        return trainer

    def connect(self, find: Callable[[], str], secret: bytes = SECRET) -> RemoteQueue:
        """Connect a producer with the trainer whose address is found."""
        client = self.channel(secret).connect(find)
        self.stack.callback(client.close)
        return RemoteQueue(client)

    def join(self, trainer: Trainer | None = None, secret: bytes = SECRET) -> RemoteQueue:
        """Join a trainer as a producer of its own."""
        address = (trainer or self.trainer).address
        return self.connect(lambda: address, secret)

    def claimed(self, rows: int = 1) -> tuple[RemoteQueue, Task]:
        """Join the trainer as a producer that claims its first task."""
        producer = self.join()
        self.trainer.offer([task(0, rows)])
        assert producer.receive(0, 0) is None
        ((claimed,), _) = producer.claim(1, 0)
        return producer, claimed

    def waiting(self) -> tuple[RemoteQueue, Future[Any]]:
        """Join the trainer, and let a claim wait there for longer than any test."""
        producer = self.join()
        claim = aside(producer.claim, 1, LONG)
        self.trainer.hears("claim", producer.producer)
        return producer, claim


class ChannelSuite(Suite):
    """The behaviour of a channel, opened through its plugin."""

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

    @pytest.fixture
    def ends(self, channel_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
        # One request may wait for longer than it takes until it is answered.
        monkeypatch.setattr(core, "LONGEST_WAIT", LONG)
        with ExitStack() as stack:
            yield Ends(self, channel_uri, stack)

    @pytest.mark.parametrize(("rows", "tokens"), [(3, 5), (8, 4000)])
    def test_tasks_and_refs_come_in_order_and_whole_however_large(
        self, ends: Ends, rows: int, tokens: int
    ) -> None:
        producer, loader = ends.join(), ends.join()
        tasks = [task(at, rows=1 + at % rows, tokens=tokens) for at in range(24)]
        ends.trainer.offer(tasks)
        found, store = producer.claim(22, 0)
        assert store == "test:"
        assert len(found) == 22, f"22 tasks were asked for, {len(found)} came"
        for one, right in zip(found, tasks, strict=False):
            for field in ("position", "batch", "loss_masks", "nbytes"):
                came, sent = (repr(getattr(x, field)) for x in (one, right))  # 3.0 is no 3
                assert came == sent, f"{field} of task {right.position} came as {came[:200]}"
        assert [one.position for one in loader.claim(4, 0)[0]] == [22, 23]
        # As long as a batch of 64 rows of 32k tokens, and more than many servers take by default.
        refs = refs_of(found[7], provenance="p" * 400 * tokens)
        assert loader.receive(7, 0) is None
        assert producer.publish(found[7].claim, refs), "its claim was lost on the way"
        assert ends.trainer.queue.receive(7, 0) == loader.receive(7, 0) == refs

    def test_a_failure_arrives_with_its_rows(self, ends: Ends) -> None:
        producer, claimed = ends.claimed(rows=3)
        assert producer.publish(claimed.claim, BadRows({1: REASON}))
        assert ends.trainer.skipped == {claimed.batch.rows[1]: REASON}

    def test_a_batch_without_a_row_is_there(self, ends: Ends) -> None:
        producer, claimed = ends.claimed()
        assert producer.publish(claimed.claim, BadRows({0: REASON}))
        assert producer.receive(0, 0) == (), "no refs, which is not the same as none yet"

    def test_a_late_publication_is_told_that_it_is_late(self, ends: Ends) -> None:
        producer, claimed = ends.claimed()
        ends.trainer.queue.leave(producer.producer)
        assert not producer.publish(claimed.claim, refs_of(claimed))
        assert ends.trainer.freed == list(refs_of(claimed))

    def test_a_tensor_is_refused_where_it_is_serialised(self, ends: Ends) -> None:
        import torch  # 1.6 s, which the processes that tests start do not pay

        producer = ends.join()
        with pytest.raises(DraftcoreError, match=r"(?s)no.* plain JSON.*tensors travel through"):
            producer.client.call({"call": "about", "producer": "x", "given": torch.ones(2)})
        assert producer.about() == {"store": "test:"}
        assert len(ends.trainer.heard) == 1

    def test_a_claim_waits_for_an_offer_and_no_longer(self, ends: Ends) -> None:
        assert come(aside(ends.join().claim, 1, 0.1))[0] == []
        _, claim = ends.waiting()
        ends.trainer.offer([task(0)])
        assert [one.position for one in come(claim)[0]] == [0]

    def test_who_waits_holds_nobody_up(self, ends: Ends) -> None:
        claims = [ends.waiting()[1] for _ in range(3)]
        assert come(aside(ends.join().about)) == {"store": "test:"}
        assert not any(claim.done() for claim in claims)

    def test_a_client_that_closes_ends_its_own_call(self, ends: Ends) -> None:
        producer, claim = ends.waiting()
        producer.client.close()
        with pytest.raises(ChannelAway):
            come(claim)

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_a_producer_hears_at_once_that_the_run_is_over(self, ends: Ends, state: str) -> None:
        _, claim = ends.waiting()
        ends.trainer.queue.end(state)
        with pytest.raises(RunEnded) as caught:
            come(claim)
        assert caught.value.state == state

    def test_a_heartbeat_is_heard(self, ends: Ends) -> None:
        """The clock is turned instead of waited for: each turn is most of the time to live."""
        trainer = ends.begin(ttl=1000)
        producer, other = ends.join(trainer), ends.join(trainer)
        trainer.offer([task(0)])
        assert producer.claim(1, 0)[0]
        for _ in range(3):
            trainer.queue.seen[producer.producer] -= 600
            producer.heartbeat()
        assert other.claim(1, 0)[0] == []

    def test_a_client_that_closes_returns_its_claims(self, ends: Ends) -> None:
        """Its own, and no other's; also one that is handed out to it when it is gone."""
        producer, stays, other = (ends.join() for _ in range(3))
        ends.trainer.offer([task(0), task(1)])
        assert producer.claim(1, 0)[0]
        ((kept,), _) = stays.claim(1, 0)
        assert other.claim(1, 0)[0] == []
        waits, _ = ends.waiting()  # first in the line for what the other returns
        waits.client.close()
        producer.client.close()
        until(lambda: other.claim(1, 1)[0], "what a client had, or was sent when gone, stays its")
        assert stays.publish(kept.claim, refs_of(kept)), "another's claims were lost as well"

    def test_a_connection_that_breaks_is_not_its_producers_end(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trainer hears of the old one's end when its producer is at work by the new one."""
        trainer, producer = ends.trainer, ends.join()
        answer, held, release = trainer.service.answer, list[threading.Thread](), threading.Event()

        def late(request: Json) -> Json:
            if request["call"] == "heartbeat" and not held:
                held.append(threading.current_thread())
                release.wait(PATIENT)  # one that answers a producer's calls in turn goes on then
            return answer(request)

        monkeypatch.setattr(trainer.service, "answer", late)
        before = set(os.listdir("/dev/fd"))
        beat = aside(producer.heartbeat)
        until(lambda: held, "a heartbeat is not heard")
        if not cut(set(os.listdir("/dev/fd")) - before):
            release.set()  # it has no connections that could break
        come(beat)
        trainer.offer([task(0)])
        ((claimed,), _) = producer.claim(1, 0)
        release.set()
        held[0].join(1.0)
        taken = producer.publish(claimed.claim, refs_of(claimed))
        assert taken, "`lost` was called for a producer that is connected anew"

    def test_what_is_closed_leaves_nothing_open(self, ends: Ends) -> None:
        """Producers come and go while a run goes on, and tests start many runs."""

        def come_and_go() -> None:
            trainer, channel = ends.begin(), ends.channel()
            client = channel.connect(lambda: trainer.address)
            assert RemoteQueue(client).about() == {"store": "test:"}
            for one in (client, channel, trainer.channel):
                one.close()

        come_and_go()
        began, files = threading.active_count(), len(os.listdir("/dev/fd"))
        for _ in range(4):
            come_and_go()
        until(lambda: threading.active_count() <= began, "threads are left")
        until(lambda: len(os.listdir("/dev/fd")) <= files, "files or sockets are left open")

    def test_a_killed_producer_loses_its_claims(self, ends: Ends) -> None:
        trainer = ends.begin(ttl=1)
        trainer.offer([task(0)])
        opening = self.plugin, ends.uri, json.dumps(dict(self.options)), trainer.address
        program = f"import sys; from {__name__} import claim_and_stay as stay; stay(*sys.argv[1:])"
        command, pipe = [sys.executable, "-c", program, *opening], subprocess.PIPE
        child = subprocess.Popen(command, stdout=pipe, env=child_environment())
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"[0]\n"
        finally:
            child.kill()
            child.communicate()
        other = ends.join(trainer)
        until(lambda: other.claim(1, 1)[0])

    def test_every_task_is_done_once_by_several_producers(self, ends: Ends) -> None:
        ends.trainer.offer([task(at) for at in range(24)])

        def work(producer: RemoteQueue) -> list[int]:
            done = list[int]()
            while len(done) < 24 and (tasks := producer.claim(1, 0)[0]):
                assert producer.publish(tasks[0].claim, refs_of(tasks[0]))
                done.append(tasks[0].position)
            return done

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(work, [ends.join() for _ in range(4)]))
        assert sorted(at for some in done for at in some) == list(range(24))
        for at in range(24):
            assert ends.trainer.queue.receive(at, 0) == refs_of(task(at))

    def test_threads_of_one_client_get_their_own_replies(self, ends: Ends) -> None:
        producer = ends.join()
        ends.trainer.offer([task(at) for at in range(8)])
        for one in producer.claim(8, 0)[0]:
            assert producer.publish(one.claim, refs_of(one))
        asked = [at % 8 for at in range(40)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda at: producer.receive(at, 0), asked))
        assert found == [refs_of(task(at)) for at in asked]

    def test_a_producer_may_begin_before_its_trainer(self, ends: Ends) -> None:
        looked, address = threading.Event(), ""

        def find() -> str:
            looked.set()
            return address

        asked = aside(ends.connect(find).about)
        assert looked.wait(SOON), "no trainer answers, and `find` was not called"
        address = ends.begin().address
        assert come(asked) == {"store": "test:"}

    def test_a_producer_goes_on_with_the_next_trainer(self, ends: Ends) -> None:
        """A call that the old one was to answer is answered by the new one, like all after it."""
        trainers = [ends.begin()]
        producer = ends.connect(lambda: trainers[-1].address)
        waiting = aside(producer.claim, 1, LONG)
        trainers[0].hears("claim", producer.producer)
        trainers[0].channel.close()
        trainers.append(ends.begin())
        trainers[0].queue.end("failed")
        trainers[1].offer([task(0)])
        (claimed,) = come(waiting)[0]
        assert producer.publish(claimed.claim, refs_of(claimed))
        assert trainers[1].queue.receive(0, 0) == refs_of(task(0))

    def test_a_client_waits_for_its_trainer_and_then_gives_up(self, ends: Ends) -> None:
        """Each of its calls as long as the first."""
        trainers, looked = [ends.trainer], threading.Event()

        def find() -> str:
            looked.set()
            return trainers[-1].address

        client = ends.channel(patience=PATIENT).connect(find)
        ends.stack.callback(client.close)
        assert RemoteQueue(client).about() == {"store": "test:"}
        trainers[0].channel.close()
        began = time.monotonic()
        asked = aside(client.call, {"call": "about", "producer": "x"})
        what = f"the hook was given patience={PATIENT:g}, seconds, and a call goes on"
        until(asked.done, what)
        with pytest.raises(ChannelAway, match=rf"did not answer for {PATIENT:g} s"):
            come(asked)
        assert time.monotonic() - began > PATIENT
        looked.clear()
        again = aside(RemoteQueue(client).about)
        assert looked.wait(SOON), "no trainer answers, and `find` was not called"
        trainers.append(ends.begin())
        until(again.done, "a call had no answer")
        soon = again.exception()
        assert soon is None, f"patience is of each call, and the second one's is over: {soon}"

    def test_another_secret_is_refused_and_harms_nobody(self, ends: Ends) -> None:
        stranger, producer = ends.join(secret=OTHER), ends.join()
        ends.trainer.offer([task(at) for at in range(8)])

        def work() -> None:
            for at in range(8):
                (claimed,) = producer.claim(1, 0)[0]
                assert producer.publish(claimed.claim, refs_of(claimed))
                assert ends.trainer.queue.receive(at, 0) == refs_of(task(at))

        refused = aside(stranger.leave)
        come(aside(work))
        assert not refused.done(), "a stranger's call was answered"
        stranger.client.close()
        with pytest.raises(ChannelAway):
            come(refused)
        assert come(aside(ends.join().about)) == {"store": "test:"}
        assert stranger.producer not in {request["producer"] for request in ends.trainer.heard}


def open_through(
    plugin: str, uri: str, data: Mapping[str, Any], secret: bytes, patience: float = PATIENCE
) -> Channel:
    """Open a channel through its plugin, as a run does."""
    name, given = uri.partition(":")[0], {"uri": uri, "secret": secret, "patience": patience}
    channel: Channel = opened(plugin, "channel", name, data, **given)
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


def come(call: Future[Any]) -> Any:
    """Wait for what a call returns or raises."""
    until(call.done, "a call had no answer")
    return call.result()


def cut(files: Iterable[str]) -> int:
    """End the connections among open files, as a network may; return how many there are."""
    count = 0
    for file in files:
        with suppress(OSError), socket.socket(fileno=os.dup(int(file))) as connection:
            connection.getpeername()  # raises for what listens
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def task(position: int, rows: int = 1, tokens: int = 5) -> Task:
    numbers = tuple(position * 10 + at for at in range(rows))
    token_ids: list[Sequence[int]] = [[n, *range(1, tokens + at)] for at, n in enumerate(numbers)]
    batch = CaptureBatch(position, numbers, tuple(f"s{n}" for n in numbers), tuple(token_ids))
    masks = tuple([at % 3 == 0 for at in range(len(ids))] for ids in token_ids)
    return Task(position, batch, masks, nbytes=10**12)


def refs_of(task: Task, provenance: str = "") -> tuple[SampleRef, ...]:
    specs = (TensorSpec("x", (5, 100), "bfloat16"),)
    more = ("1", "test:", specs, 5, 10**12, provenance)
    return tuple(SampleRef(one, *more) for one in task.batch.ids)


def claim_and_stay(plugin: str, uri: str, options: str, address: str) -> None:
    """Be another process, which claims a task and does no more."""
    client = open_through(plugin, uri, json.loads(options), SECRET).connect(lambda: address)
    tasks, _ = RemoteQueue(client).claim(1, 0)
    print([one.position for one in tasks], flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
