"""The channel `dir`: the suite of all channels, torn lines, files that follow each other, restarts."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftcore_disagg.channel import Client, Json
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sharedfs import channel as module
from draftcore_sharedfs.channel import DirChannel, Lines

from draftcore.errors import UsageError

SECRET = b"what both ends know"


class TestSharedfsPlugin(PluginSuite):
    plugin = "draftcore_sharedfs.plugin"


class TestDirChannel(ChannelSuite):
    plugin = "draftcore_sharedfs.plugin"


class Echo:
    """A service whose replies say what was asked and who answers."""

    def __init__(self, name: str = "echo") -> None:
        self.name = name

    def answer(self, request: Json) -> Json:
        return {"by": self.name, **request}

    def lost(self, producer: str) -> None: ...


@pytest.fixture
def lines(tmp_path: Path) -> tuple[Lines, Lines]:
    """A writer and a reader of the same lines."""
    (tmp_path / "one.000001").touch()
    return Lines(tmp_path, "one", SECRET), Lines(tmp_path, "one", SECRET)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = DirChannel(tmp_path, SECRET, 60.0).connect(str)
    yield client
    client.close()


def test_a_torn_line_is_not_parsed_until_it_is_whole(lines: tuple[Lines, Lines]) -> None:
    writer, reader = lines
    file = writer.path(1)
    writer.write(b'{"n":1}')
    assert reader.read() == {"n": 1}
    before = file.stat().st_size
    writer.write(b'{"n":2}')
    whole = file.read_bytes()
    for end in range(before, len(whole)):
        file.write_bytes(whole[:end])
        assert reader.read() is None
    file.write_bytes(whole[:-20] + bytes(10) + whole[-10:])  # with a hole
    assert reader.read() is None
    file.write_bytes(whole)
    assert reader.read() == {"n": 2}


@pytest.mark.parametrize("of", ["secret", "name", "start", "number"])
def test_a_line_of_another_is_never_parsed(
    tmp_path: Path, lines: tuple[Lines, Lines], of: str
) -> None:
    writer, reader = lines
    other = Lines(
        tmp_path / "another" if of == "start" else tmp_path,
        "another" if of == "name" else "one",
        b"another" if of == "secret" else SECRET,
    )
    other.path(1).parent.mkdir(exist_ok=True)
    other.path(1).touch()
    if of == "number":
        other.number = 1
    other.write(b'{"n":1}')
    writer.path(1).write_bytes(other.path(1).read_bytes())
    assert reader.read() is None


def test_a_write_that_failed_is_repeated_in_its_place(
    lines: tuple[Lines, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = lines
    writer.write(b'{"n":1}')
    pwrite = os.pwrite

    def until_full(file: int, data: memoryview, at: int) -> int:
        pwrite(file, data[:7], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", until_full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(b'{"n":2}')
    writer.write(b'{"n":2}')
    assert [reader.read(), reader.read(), reader.read()] == [{"n": 1}, {"n": 2}, None]


def test_a_long_run_leaves_few_files(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT", 200)
    channel = DirChannel(tmp_path, SECRET, 60.0)
    start = channel.serve(Echo())
    for number in range(20):
        assert client.call({"n": number}) == {"by": "echo", "n": number}
    assert len(list((tmp_path / start).iterdir())) <= 4  # a file and its successor, each way
    channel.close()


def test_a_trainer_that_died_is_followed_by_the_next_one(tmp_path: Path, client: Client) -> None:
    """It left no end marker. Its files are removed, and it spoils nothing if it was only frozen."""
    died, then = DirChannel(tmp_path, SECRET, 60.0), DirChannel(tmp_path, SECRET, 60.0)
    old = died.serve(Echo("the first"))
    assert client.call({"n": 1}) == {"by": "the first", "n": 1}
    new = then.serve(Echo("the next"))
    assert client.call({"n": 2}) == {"by": "the next", "n": 2}
    assert {new} == {path.name for path in tmp_path.glob("start-*")} - {old}
    assert not (tmp_path / old).exists()
    died.close()
    assert client.call({"n": 3}) == {"by": "the next", "n": 3}
    then.close()


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path, client: Client) -> None:
    ours = DirChannel(tmp_path, SECRET, 60.0)
    ours.serve(Echo())
    with pytest.raises(UsageError, match=r"(?s)of another run.*name a folder of this run's own"):
        DirChannel(tmp_path, b"another", 60.0).serve(Echo("another"))
    assert client.call({"n": 1}) == {"by": "echo", "n": 1}
    ours.close()


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot use the folder"):
        DirChannel.open(f"dir:{tmp_path}/file", SECRET).serve(Echo())
    with pytest.raises(UsageError, match=r"(?s)names no folder.*write dir:FOLDER"):
        DirChannel.open("dir:", SECRET)
