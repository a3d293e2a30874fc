"""What channels between processes share, over SQLite's transport and that of `draftcore-sharedfs`."""

import json
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from draftcore_sdk.channel_ends import SOON, eventually, received, refs_of, step, task
from draftcore_sdk.suite import child_environment
from draftcore_sharedfs.log import DirLog

from draftcore.channels.log import Letter
from draftcore.channels.logged import LoggedChannel
from draftcore.channels.sqlite import SqliteLog
from draftcore.contracts.channel import CaptureTask, ChannelEnded
from draftcore.errors import DraftcoreError, UsageError

LOGS: dict[str, type[SqliteLog] | type[DirLog]] = {"sqlite": SqliteLog, "dir": DirLog}
Open = Callable[[str], LoggedChannel]
Die = Callable[[LoggedChannel], None]


@pytest.fixture(params=sorted(LOGS))
def scheme(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture
def open_end(scheme: str, tmp_path: Path) -> Iterator[Open]:
    opened: list[LoggedChannel] = []

    def opener(role: str) -> LoggedChannel:
        opened.append(LOGS[scheme].open(f"{scheme}:{tmp_path / 'channel'}?ttl=1", "run", role))
        return opened[-1]

    yield opener
    for end in reversed(opened):
        with suppress(DraftcoreError):  # of an end that a test has made fail
            end.close()


def claimed(producer: LoggedChannel, claimant: str = "x") -> CaptureTask:
    claim = producer.claim(claimant, wait=SOON)
    assert claim is not None
    return claim


@pytest.fixture
def die(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Die:
    """End a channel's thread as a kill would: nothing is said to anybody."""
    killed, read = set[str](), LOGS[scheme].read

    def reads(log: Any) -> list[Letter]:
        if threading.current_thread().name in killed:
            raise DraftcoreError("killed")
        return read(log)

    def die(end: LoggedChannel) -> None:
        killed.add(f"channel {end.name}")
        eventually(lambda: killed.isdisjoint(thread.name for thread in threading.enumerate()))

    monkeypatch.setattr(LOGS[scheme], "read", reads)
    return die


def forge(scheme: str, place: Path, writer: str, reader: str, record: object) -> None:
    """Put a record into a mailbox in the name of a process that is there and writes, too."""
    line = json.dumps(record)
    if scheme == "dir":
        with (place / "mailboxes" / reader / f"{writer}.00000001.jsonl").open("a") as file:
            file.write(f"{line}\n")
    else:
        with closing(sqlite3.connect(place)) as connection, connection:
            insert = "INSERT INTO letters (recipient, writer, body) VALUES (?, ?, ?)"
            connection.execute(insert, [reader, writer, line])


def test_what_a_dead_trainer_had_not_read_is_freed_by_the_next(open_end: Open, die: Die) -> None:
    """Not at once: its producer finds it in the store when it is asked for the group again."""
    old, producer = open_end("trainer"), open_end("producer")
    old.offer([task(0, 0), task(0, 1)])
    first, second = claimed(producer), claimed(producer)
    die(old)
    producer.publish(first, refs_of(first, "unread"))
    new = open_end("trainer")
    new.offer([task(0, 0), task(0, 1)])
    again = claimed(producer)
    assert again == task(0, 0)
    assert again.claim != first.claim
    assert new.advance(0) == ()
    producer.publish(again, refs_of(again, "unread"))  # found there
    second = claimed(producer)
    producer.publish(second, refs_of(second, "new"))
    for index, generations in enumerate([["unread", "new"], ["new", "unread"]]):
        assert [ref.generation for ref in received(new, step(index))] == generations
    released = sorted((ref.feature_id, ref.generation) for ref in new.advance(2))
    assert released == [("a", "unread"), ("b", "unread"), ("c", "new"), ("d", "new")]


def test_unread_refs_that_nobody_asks_for_again_are_freed_in_the_end(
    open_end: Open, die: Die
) -> None:
    old, producer = open_end("trainer"), open_end("producer")
    old.offer([task(0, 3)])
    claim = claimed(producer)
    die(old)
    producer.publish(claim, refs_of(claim, "unread"))
    new = open_end("trainer")
    new.offer([task(0, 0), task(0, 1)])
    assert new.advance(0) == ()
    claims = [claimed(producer), claimed(producer)]
    for claim in claims:
        producer.publish(claim, refs_of(claim))
    assert producer.claim("x", wait=0.3) is None
    assert {ref.generation for ref in new.advance(0)} == {"unread"}


def test_an_answer_that_nobody_waits_for_is_handed_out_again(
    open_end: Open, scheme: str, tmp_path: Path
) -> None:
    """A producer that was declared dead, and is not, may be answered twice."""
    trainer, producer = open_end("trainer"), open_end("producer")
    trainer.offer([task(0, 0), task(0, 1)])
    assert claimed(producer) == task(0, 0)
    request = {"kind": "beat", "wants": {"y": 1}}
    forge(scheme, tmp_path / "channel", producer.name, trainer.name, request)
    eventually(lambda: trainer.standing().refs == 4)  # both tasks are claimed
    assert claimed(producer) == task(0, 1)


def test_an_answer_of_another_session_is_ignored(
    open_end: Open, scheme: str, tmp_path: Path
) -> None:
    trainer, producer = open_end("trainer"), open_end("producer")
    trainer.offer([task(0, 0), task(0, 1)])
    first = claimed(producer)
    log = LOGS[scheme](tmp_path / "channel", "trainer-old")
    answer = {"kind": "task", "task": first.to_json(), "claimant": "x", "request": 2, "round": 1}
    log.append([(producer.name, answer)])
    log.close()
    assert claimed(producer) == task(0, 1)


def test_a_trainer_without_producers_says_what_the_last_one_was_told(open_end: Open) -> None:
    trainer, producer = open_end("trainer"), open_end("producer")
    trainer.offer([task(0, 0)])
    assert trainer.receive(step(0)) is None
    first = claimed(producer)
    with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
        producer.claim("x", wait=SOON)
    assert first == task(0, 0)
    assert trainer.receive(step(0)) is None
    producer.close()
    with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
        eventually(lambda: trainer.receive(step(0)))


def test_a_channel_ends_finished_or_failed(open_end: Open) -> None:
    with pytest.raises(ValueError, match="not 'runing'"):
        open_end("trainer").close("runing")


@pytest.mark.parametrize(
    "options", ["ttl=0", "ttl=soon", "patience=-1", "attempts=0", "limit_ref=3", "timeout=3"]
)
def test_a_wrong_option_is_refused(scheme: str, tmp_path: Path, options: str) -> None:
    with pytest.raises(UsageError, match=options.partition("=")[0]):
        LOGS[scheme].open(f"{scheme}:{tmp_path / 'channel'}?{options}", "run", "trainer")


def test_a_uri_without_a_place_is_refused(scheme: str) -> None:
    with pytest.raises(UsageError, match="names no"):
        LOGS[scheme].open(f"{scheme}:", "run", "trainer")


# ---------------------------------------------------------------- places that cannot be used


def test_a_place_without_permission_is_named(scheme: str) -> None:
    """In a child, as a user who is not root, whom no permission stops."""
    program = f"""
        import os, tempfile
        from pathlib import Path
        from {LOGS[scheme].__module__} import {LOGS[scheme].__name__} as Log
        from draftcore.errors import UsageError
        folder = tempfile.mkdtemp()
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            Log(Path(folder, "c"), "me")
        except UsageError as error:
            print(str(error).replace(folder, "FOLDER"))
        os.seteuid(os.getuid())
        os.rmdir(folder)
    """
    output = run(program)
    assert output.startswith("the channel cannot use the f")
    assert "FOLDER/c: " in output
    assert "this user may write" in output


def test_a_full_disk_is_reported_by_both_ends(scheme: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; it is set when all is open."""
    program = f"""
        import resource
        from {LOGS[scheme].__module__} import {LOGS[scheme].__name__} as Log
        from draftcore.errors import DraftcoreError
        from draftcore_sdk.channel_ends import refs_of, step, task
        trainer, producer = (
            Log.open("{scheme}:{tmp_path}/c?ttl=1", "run", role) for role in ("trainer", "producer")
        )
        trainer.offer([task(0, 0), task(0, 1)])
        claim = producer.claim("one", wait=20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            producer.publish(claim, refs_of(claim))
        except DraftcoreError as error:
            print("producer:", error)
        try:
            while trainer.receive(step(0)) is None:
                pass
        except DraftcoreError as error:
            print("trainer:", error)
        trainer.close()
        producer.close()
    """
    output = run(program)
    assert [line.split(":")[0] for line in output.splitlines()[::2]] == ["producer", "trainer"]
    assert output.count("cannot be written") == 2
    assert output.count("free space on its disk") == 2


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trainer_whose_head_is_lost_begins_a_new_session(
    open_end: Open, scheme: str, tmp_path: Path
) -> None:
    """Nobody knows which letters went with it: what was claimed is claimed again."""
    trainer, producer = open_end("trainer"), open_end("producer")
    trainer.offer([task(0, 0), task(0, 1)])
    void, before = claimed(producer), trainer.name
    if scheme == "dir":
        (tmp_path / "channel" / "head.json").unlink()
    else:
        with closing(sqlite3.connect(tmp_path / "channel")) as connection, connection:
            connection.execute("DELETE FROM head")
    eventually(lambda: trainer.name != before)
    claims = [claimed(producer) for _ in range(2)]
    assert claims == [task(0, 0), task(0, 1)]
    producer.publish(void, refs_of(void, "void"))
    for claim in claims:
        producer.publish(claim, refs_of(claim, "new"))
    for index in (0, 1):
        assert {ref.generation for ref in received(trainer, step(index))} == {"new"}
    assert ("a", "void") in {(ref.feature_id, ref.generation) for ref in trainer.advance(2)}
    trainer.close()
    with pytest.raises(ChannelEnded):
        claimed(producer)


def test_a_replaced_trainers_announcement_is_not_heard(open_end: Open) -> None:
    old, new = open_end("trainer"), open_end("trainer")
    old.announce({"store": "old:"})  # it has not noticed yet
    with pytest.raises(DraftcoreError, match="another trainer has taken over"):
        eventually(lambda: old.receive(step(0)) is not None)
    new.announce({"store": "new:"})
    assert open_end("producer").about(SOON) == {"store": "new:"}
