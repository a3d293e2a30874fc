"""What becomes of a run whose server is killed, restarted, emptied, frozen or gone."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from draftcore_redis.log import RedisLog
from draftcore_redis.plugin import channel
from draftcore_redis.server import Server

from draftcore.channels.logged import LoggedChannel
from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.channel import CaptureTask, ChannelEnded, PlannedStep
from draftcore.contracts.store import SampleRef
from draftcore.errors import DraftcoreError, UsageError

SOON = 30.0  # seconds within which what must come has come, on a busy machine


def open_end(uri: str, role: str, run_id: str = "tests") -> LoggedChannel:
    found = channel("redis", uri, run_id, role)
    assert found is not None
    return found


def task(index: int, size: int = 2) -> CaptureTask:
    rows = tuple(range(size * index, size * (index + 1)))
    return CaptureTask(0, CaptureGroup(index, rows, tuple(f"s{row}" for row in rows), 8))


def refs_of(task: CaptureTask) -> list[SampleRef]:
    return [SampleRef(name, task.claim, "test:", (), 1, 1) for name in task.group.feature_ids]


def step(index: int) -> PlannedStep:
    names = task(index).group.feature_ids
    return PlannedStep(index, 0, tuple(SampleId(name, 0) for name in names), task(index).group.rows)


def eventually(holds: Callable[[], object], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@dataclass
class Run:
    """Trains step by step and captures at the other end, each in a thread of its own."""

    uri: str
    steps: int
    trained: list[tuple[str, ...]] = field(default_factory=list)
    problems: list[Exception] = field(default_factory=list)

    def train(self) -> None:
        trainer = open_end(self.uri, "trainer")
        try:
            trainer.offer(task(index) for index in range(self.steps))
            for index in range(self.steps):
                while (refs := trainer.receive(step(index))) is None:
                    time.sleep(0.001)
                self.trained.append(tuple(ref.feature_id for ref in refs))
                trainer.advance(index + 1)
            trainer.close("finished")
        except DraftcoreError as error:
            self.problems.append(error)

    def produce(self) -> None:
        producer = open_end(self.uri, "producer")
        try:
            while True:
                claim = producer.claim("one", wait=1)
                if claim is not None:
                    time.sleep(0.005)  # a forward pass
                    producer.publish(claim, refs_of(claim))
        except ChannelEnded:
            pass
        except DraftcoreError as error:
            self.problems.append(error)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Harm it inside; it must then end with each sample trained once, in order."""
        threads = [threading.Thread(target=part) for part in (self.train, self.produce)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: len(self.trained) > 20 or self.problems)
            assert len(self.trained) < self.steps
            yield
        finally:
            for thread in threads:
                thread.join(SOON)
        assert not any(thread.is_alive() for thread in threads), f"{len(self.trained)} steps"
        assert self.problems == []
        assert self.trained == [task(index).group.feature_ids for index in range(self.steps)]


def uri_on(server: Any, options: str = "") -> str:
    return f"redis://{server.address}?prefix=faults&ttl=2&limit_refs=16{options}"


def log_on(server: Any, name: str, options: str = "") -> RedisLog:
    return RedisLog(Server.parse(uri_on(server, options))[0], name)


# ---------------------------------------------------------------- the run goes on


@pytest.mark.parametrize("keeps_its_data", [True, False])
def test_a_run_survives_a_killed_server(
    new_server: Callable[..., Any], keeps_its_data: bool
) -> None:
    server = new_server()
    with Run(uri_on(server), steps=300).going_on():
        server.kill()
        time.sleep(0.5)
        if not keeps_its_data:
            server.forget()
        server.start()


def test_a_run_survives_a_server_that_is_killed_again_and_again(
    new_server: Callable[..., Any],
) -> None:
    server = new_server()
    with Run(uri_on(server), steps=400).going_on():
        for _ in range(4):
            server.kill()
            server.start()
            time.sleep(0.4)


def test_a_run_survives_an_emptied_server(new_server: Callable[..., Any]) -> None:
    server = new_server()
    with Run(uri_on(server), steps=300).going_on(), server.client() as client:
        client.flushall()


def test_a_run_survives_a_server_that_is_frozen_longer_than_the_ttl(
    new_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody takes the other side for dead: it could not be heard."""
    server = new_server()
    with Run(uri_on(server), steps=300).going_on(), server.frozen():
        time.sleep(7)  # longer than a client waits for an answer
    assert any("does not answer" in text for text in caplog.messages)
    assert not any("is silent" in text for text in caplog.messages)


def test_a_server_with_the_clock_behind_is_heard_after_it_lost_its_data(
    new_server: Callable[..., Any],
) -> None:
    """Its entries' numbers, which are times, are then below those that were read."""
    server = new_server()
    with closing(log_on(server, "reader")) as reader, closing(log_on(server, "writer")) as writer:
        writer.set_head({"session": 1})
        assert reader.head() is not None
        with server.client() as client:
            ahead = f"{int(1000 * time.time()) + 10**6}-0"
            entry = {"writer": "other", "number": 1, "record": "{}"}
            client.xadd("faults:mailbox:reader", entry, id=ahead)
        assert reader.read() == [("other", {})]
        server.kill()
        server.forget()
        server.start()
        writer.append([("reader", {"text": "after"})])
        assert reader.read() == []
        assert writer.head() is None
        writer.set_head({"session": 2})
        assert reader.head() is not None
        assert reader.read() == [("writer", {"text": "after"})]


def test_a_restarted_servers_head_is_void_until_it_is_written_anew(
    new_server: Callable[..., Any],
) -> None:
    """Without an fsync per write the server may have lost letters and kept the head."""
    server = new_server()
    with closing(log_on(server, "one")) as one, closing(log_on(server, "two")) as two:
        one.set_head({"session": 1})
        assert one.head() == two.head() != None  # noqa: E711
        server.kill()
        server.start()
        assert one.head() is None
        assert two.head() is None
        with closing(log_on(server, "late")) as late:
            assert late.head() is not None  # whose run it is can still be told
        one.set_head({"session": 2})
        for log in (one, two):
            assert (log.head() or {})["session"] == 2


def test_a_head_that_is_written_before_a_restart_is_noticed_stays_void(
    new_server: Callable[..., Any],
) -> None:
    """Or nobody would ever ask which letters were lost."""
    server = new_server()
    with closing(log_on(server, "one")) as one, closing(log_on(server, "two")) as two:
        one.set_head({"session": 1})
        assert two.head() is not None
        server.kill()
        server.start()
        one.set_head({"session": 1, "about": "more"})
        assert two.head() is None
        assert one.head() is None
        one.set_head({"session": 2})
        assert two.head() == one.head() != None  # noqa: E711


def test_a_letter_that_was_said_twice_is_read_once(new_server: Callable[..., Any]) -> None:
    """A frozen server hears both the first try and the second."""
    server = new_server()
    with closing(log_on(server, "reader")) as reader, closing(log_on(server, "writer")) as writer:
        writer.append([("reader", {"text": "w"})])  # the connection is there: the first try is sent
        with server.frozen():
            said = threading.Thread(target=writer.append, args=([("reader", {"text": "x"})],))
            said.start()
            time.sleep(6)
        said.join()
        writer.append([("reader", {"text": "y"})])
        with server.client() as client:
            assert client.xlen("faults:mailbox:reader") > 3
        assert reader.read() == [("writer", {"text": text}) for text in "wxy"]


@pytest.mark.parametrize(
    ("refuse", "accept"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    ],
)
def test_a_refusal_that_somebody_may_mend_is_waited_for(
    new_server: Callable[..., Any], refuse: str, accept: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server()
    with closing(log_on(server, "one")) as log, server.client() as client:
        client.execute_command(*refuse.split())
        said = threading.Thread(target=log.append, args=([("one", {"text": "x"})],))
        said.start()
        eventually(lambda: "the run waits for it" in caplog.text)
        client.execute_command(*accept.split())
        said.join()
        assert log.read() == [("one", {"text": "x"})]


def test_a_producer_that_starts_while_the_server_is_away_waits_for_it(
    new_server: Callable[..., Any],
) -> None:
    """Else a supervisor that starts a killed one again would take it for refused."""
    server = new_server()
    with closing(open_end(uri_on(server), "trainer")) as trainer:
        trainer.offer([task(0)])
        server.kill()
        ends: list[LoggedChannel] = []
        opening = threading.Thread(target=lambda: ends.append(open_end(uri_on(server), "producer")))
        opening.start()
        with pytest.raises(UsageError, match="does not answer"):
            open_end(uri_on(server), "trainer")
        server.start()
        opening.join(SOON)
        assert ends[0].claim("one", wait=SOON) is not None
        ends[0].close()


# ---------------------------------------------------------------- the run ends


def test_a_server_that_stays_away_ends_both_ends_with_a_sentence(
    new_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server()
    uri = uri_on(server, "&patience=1.5")
    trainer, producer = open_end(uri, "trainer"), open_end(uri, "producer")
    trainer.offer([task(0), task(1)])
    claim = producer.claim("one", wait=10)
    assert claim is not None
    server.kill()
    began = time.monotonic()
    at = rf"Redis at {server.address} does not answer: Connection refused, for [12] s now\n  start it"
    with pytest.raises(DraftcoreError, match=at):
        producer.publish(claim, refs_of(claim))
    with pytest.raises(DraftcoreError, match=at):
        eventually(lambda: trainer.receive(step(0)))
    assert time.monotonic() - began < 10
    told = [
        record
        for record in caplog.records
        if "the run waits for it up to 2 s" in record.msg % record.args
    ]
    assert 1 <= len(told) <= 4  # one per call that waits
    for end in (trainer, producer):
        end.close("failed")


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_channel_is_closed_in_seconds_while_its_server_is_away(
    new_server: Callable[..., Any], how: str
) -> None:
    server = new_server()
    uri = uri_on(server, "&patience=600")
    trainer, producer = open_end(uri, "trainer"), open_end(uri, "producer")
    trainer.offer([task(0)])
    assert producer.claim("one", wait=10) is not None
    if how == "killed":
        server.kill()
    with server.frozen() if how == "frozen" else closing(server.client()):
        time.sleep(0.5)
        for end in (producer, trainer):
            began = time.monotonic()
            with suppress(DraftcoreError):  # or its thread has met the problem first
                end.close("finished")
            assert time.monotonic() - began < 12
            end.close("finished")


def test_a_producer_hears_of_the_end_that_was_told_after_a_restart(
    new_server: Callable[..., Any],
) -> None:
    server = new_server()
    trainer, producer = (open_end(uri_on(server), role) for role in ("trainer", "producer"))
    trainer.offer([])
    server.kill()
    server.forget()
    server.start()
    trainer.close("finished")
    with pytest.raises(ChannelEnded, match="is finished"):
        eventually(lambda: producer.claim("one", wait=1))
    producer.close()


# ---------------------------------------------------------------- what is left


def test_the_keys_of_an_abandoned_run_expire(new_server: Callable[..., Any]) -> None:
    server = new_server()
    uri = uri_on(server, "&expire=2&patience=1")
    with server.client() as client:
        with closing(log_on(server, "abandoned", "&expire=2&patience=1")) as log:
            log.set_head({"session": "abandoned"})
            log.append([("nobody", {})])
        assert len(client.keys("*")) == 2
        trainer = open_end(uri.replace("=faults", "=alive"), "trainer")
        eventually(lambda: not client.keys("faults:*"), 10)
        time.sleep(2.5)
        assert client.keys("alive:*") == [b"alive:head"]
        trainer.close()


def test_nothing_is_left_of_a_finished_run_but_its_head(new_server: Callable[..., Any]) -> None:
    server = new_server()
    with Run(uri_on(server), steps=100).going_on():
        pass
    with server.client() as client:
        left = {key: client.xlen(key) for key in client.keys("*") if key != b"faults:head"}
    assert sum(left.values()) < 300, left


def test_the_wait_for_a_server_is_told_once_and_its_return_too(
    new_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server()
    caplog.set_level(logging.WARNING)
    with closing(log_on(server, "one")) as log:
        server.kill()
        looking = threading.Thread(target=log.head)
        looking.start()
        time.sleep(1)
        server.start()
        looking.join()
    away, back = caplog.messages
    assert "does not answer: Connection refused; the run waits for it up to 600 s" in away
    assert "is back after" in back
