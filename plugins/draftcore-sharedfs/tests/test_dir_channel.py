"""The channel `dir`: the conformance suites, segments, torn lines, and names in its folder."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sharedfs import log as module
from draftcore_sharedfs.log import DirLog

from draftcore.channels.logged import Head
from draftcore.errors import DraftcoreError


class TestSharedfsPlugin(PluginSuite):
    plugin = "draftcore_sharedfs.plugin"


class TestDirChannel(ChannelSuite):
    plugin = "draftcore_sharedfs.plugin"

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        folder = Path(uri.removeprefix("dir:"))
        log = DirLog(folder, "vandal")
        head = Head.of(log)
        log.close()
        assert head is not None
        file = folder / "mailboxes" / head.session / "vandal.00000001.jsonl"
        file.write_bytes(b"\n".join(bodies) + b"\n")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[DirLog]:
    log = DirLog(tmp_path, "reader")
    yield log
    log.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[DirLog]:
    log = DirLog(tmp_path, "writer")
    yield log
    log.close()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT", 50)


def send(log: DirLog, *numbers: int) -> None:
    log.append([("reader", {"n": number}) for number in numbers])


def numbers(log: DirLog) -> list[int]:
    return [record["n"] for _, record in log.read()]


def segments(folder: Path, mailbox: str = "reader") -> list[str]:
    return sorted(path.name for path in (folder / "mailboxes" / mailbox).iterdir())


def test_a_torn_last_line_is_not_parsed_until_it_is_whole(
    tmp_path: Path, reader: DirLog, writer: DirLog
) -> None:
    send(writer, 1)
    file = tmp_path / "mailboxes" / "reader" / "writer.00000001.jsonl"
    line = b'{"n": 23}\n'
    for at in range(len(line)):
        with file.open("ab") as stream:
            stream.write(line[at : at + 1])
        assert numbers(reader) == {0: [1], len(line) - 1: [23]}.get(at, [])


def test_a_torn_line_of_a_dead_writer_hides_nobody_elses(
    tmp_path: Path, reader: DirLog, writer: DirLog
) -> None:
    (tmp_path / "mailboxes" / "reader" / "dead.00000001.jsonl").write_bytes(b'{"n": 1}\n{"n": 2')
    send(writer, 3)
    assert numbers(reader) == [1, 3]


@pytest.mark.usefixtures("small_segments")
def test_segments_of_one_writer_are_read_in_order_and_go_once_read(
    tmp_path: Path, reader: DirLog, writer: DirLog
) -> None:
    for number in range(100):
        send(writer, number)
    assert len(segments(tmp_path)) > 10
    assert numbers(reader) == list(range(100))
    reader.trim()
    assert len(segments(tmp_path)) == 1
    send(writer, 100)
    assert numbers(reader) == [100]


@pytest.mark.usefixtures("small_segments")
def test_the_next_segment_is_found_by_name_where_the_listing_is_late(
    tmp_path: Path, reader: DirLog, writer: DirLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show a new name in a listing as much as a minute late."""
    send(writer, 0)
    assert numbers(reader) == [0]
    listed = segments(tmp_path)
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    for number in range(1, 100):
        send(writer, number)
    assert numbers(reader) == list(range(1, 100))


def test_after_a_failed_write_a_new_segment_begins(
    reader: DirLog,
    writer: DirLog,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a line may be on the disk: the record is lost, whole, and those after it are not."""
    send(writer, 1)
    write = os.write

    def until_full(file: int, data: memoryview) -> int:
        write(file, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", until_full)
        with pytest.raises(DraftcoreError, match=r"(?s)cannot be written.*free space"):
            send(writer, 2)
    assert numbers(reader) == [1]
    send(writer, 3)
    assert numbers(reader) == [3]
    assert "torn after 9 bytes of writer.00000001.jsonl" in caplog.text


def test_two_processes_of_one_name_are_refused(tmp_path: Path, writer: DirLog) -> None:
    twin = DirLog(tmp_path, "writer")
    send(writer, 1)
    with pytest.raises(DraftcoreError, match="another process writes as 'writer'"):
        send(twin, 2)
    twin.close()


def test_a_writer_that_was_dropped_is_heard_again(
    tmp_path: Path, reader: DirLog, writer: DirLog
) -> None:
    send(writer, 1)
    assert numbers(reader) == [1]
    reader.drop("writer")
    assert segments(tmp_path) == []
    send(writer, 2)
    assert numbers(reader) == [2]
    assert segments(tmp_path) == ["writer.00000002.jsonl"]


def test_a_reader_that_was_dropped_goes_on_with_what_comes_then(
    reader: DirLog, writer: DirLog
) -> None:
    send(writer, 1)
    assert numbers(reader) == [1]
    send(writer, 2)
    writer.drop("reader")
    assert numbers(reader) == []
    send(writer, 3)
    assert numbers(reader) == [3]


@pytest.mark.parametrize("name", ["..", "../reader", "/etc", "a/b", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(
    tmp_path: Path, writer: DirLog, name: str
) -> None:
    with pytest.raises(DraftcoreError, match="cannot be the name of a mailbox"):
        DirLog(tmp_path / "folder", name)
    with pytest.raises(DraftcoreError, match="cannot be the name of a mailbox"):
        writer.append([(name, {"n": 1})])
    assert [path.name for path in tmp_path.iterdir()] == ["mailboxes"]


def test_other_files_in_a_mailbox_are_left_alone(tmp_path: Path, reader: DirLog) -> None:
    for name in (".hidden.00000001.jsonl", "notes.txt", "a.1.jsonl"):
        (tmp_path / "mailboxes" / "reader" / name).write_text('{"n": 1}\n')
    assert reader.read() == []
    reader.trim()
    assert len(segments(tmp_path)) == 3


def test_a_head_is_replaced_whole(tmp_path: Path, reader: DirLog) -> None:
    assert reader.head() is None
    reader.set_head({"state": "running", "long": "x" * 5000})
    reader.set_head({"state": "finished"})
    assert reader.head() == {"state": "finished"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.json", "mailboxes"]
