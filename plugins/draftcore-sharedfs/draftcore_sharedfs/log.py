"""Channel `dir`: mailboxes in a folder that several hosts may share.

    dir:/mnt/runs/my-draft/channel?limit_refs=4096

    head.json                                    replaced atomically
    mailboxes/RECIPIENT/WRITER.00000001.jsonl    appended to and fsync'd by WRITER alone

A file has one writer and one reader, so nothing is ever locked, and a record is what a line feed
ends: a half-written last line is never parsed. A file that has grown to a segment's size is followed
by the next one and removed by its reader once read. Its last line is then `null`, which only tells
the reader to look for the next by name: a network file system may show a new name in a listing as
much as a minute late (a new process is noticed as late as that), but finds it when asked.

After a failed write, of a full disk say, a writer goes on in a new segment, since nobody knows how
much of the line has been written; the torn end of the old one is skipped and reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftcore.channels import require_name
from draftcore.channels.log import Letter, parse_record, report
from draftcore.channels.logged import OPTIONS, LoggedChannel
from draftcore.channels.opening import open_end
from draftcore.errors import DraftcoreError, UsageError
from draftcore.uris import parse_uri

POLL = 0.01  # seconds between two reads of an idle process
SEGMENT = 2**18  # bytes
FILE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)\.(\d{8})\.jsonl")
ENDS = b"null"  # the last line of a segment that has a successor


@dataclass
class _Segment:
    """Where one writer's records to one reader are, for either of them: `at` bytes into a file."""

    number: int
    at: int = 0
    file: int = -1  # the writer's descriptor; -1 where a new segment is to begin


class DirLog:
    """A mailbox in a folder; see `draftcore.channels.log.Log`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, require_name("mailbox", name)
        self._mutex = threading.Lock()  # around `append`
        self._written: dict[str, _Segment] = {}  # by recipient
        self._read: dict[str, _Segment] = {}  # by writer
        self._done: list[Path] = []  # read to their ends
        try:
            self._mailbox(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the channel cannot use the folder {folder}: {error}\n"
                "  name a folder that this user may write"
            ) from error

    @classmethod
    def open(cls, uri: str, run_id: str, role: str) -> LoggedChannel:
        """Open one end of the channel `dir:FOLDER?ttl=30&...`; see `logged.Settings`."""
        parsed = parse_uri(uri, known=OPTIONS)
        if not parsed.path:
            raise UsageError(f"the channel {uri!r} names no folder\n  write dir:FOLDER")
        folder = Path(parsed.path).expanduser()
        return open_end(parsed, run_id, role, lambda name: cls(folder, name))

    # ------------------------------------------------------------ the head

    def head(self) -> dict[str, Any] | None:
        with self._explained("read"):
            try:
                text = (self.folder / "head.json").read_bytes()
            except FileNotFoundError:
                return None
        return parse_record("head", text) or {}

    def set_head(self, head: Mapping[str, Any]) -> None:
        aside = self.folder / f".head.{self.name}"
        with self._explained("written"):
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps(dict(head)))
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(self.folder / "head.json")
            _sync_folder(self.folder)

    # ------------------------------------------------------------ to others

    def append(self, letters: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        lines: dict[str, list[bytes]] = {}
        for to, record in letters:
            lines.setdefault(to, []).append(json.dumps(dict(record)).encode() + b"\n")
        with self._mutex, self._explained("written"):
            for to, block in lines.items():
                self._write(to, b"".join(block))

    def _write(self, to: str, data: bytes) -> None:
        segment = self._written.setdefault(to, _Segment(0))
        if segment.at >= SEGMENT and segment.file >= 0:
            full = segment.file
            self._begin(to, segment)
            _write_all(full, ENDS + b"\n")
            os.close(full)
        elif segment.file < 0:
            self._begin(to, segment)
        self._write_here(segment, data)
        if os.fstat(segment.file).st_nlink == 0:  # the reader took this process for dead
            self._end(segment)
            self._begin(to, segment)
            self._write_here(segment, data)

    def _begin(self, to: str, segment: _Segment) -> None:
        """Create the next segment. Raises DraftcoreError where another process writes it."""
        mailbox = self._mailbox(to)
        mailbox.mkdir(parents=True, exist_ok=True)
        path = mailbox / f"{self.name}.{segment.number + 1:08}.jsonl"
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            raise DraftcoreError(
                f"another process writes as {self.name!r} into the channel {self.folder}\n"
                "  give every process a name of its own"
            ) from None
        segment.number, segment.at, segment.file = segment.number + 1, 0, file
        _sync_folder(mailbox)

    def _write_here(self, segment: _Segment, data: bytes) -> None:
        try:
            _write_all(segment.file, data)
        except OSError:
            self._end(segment)
            raise
        segment.at += len(data)

    def _end(self, segment: _Segment) -> None:
        os.close(segment.file)
        segment.file = -1

    # ------------------------------------------------------------ from others

    def read(self) -> list[Letter]:
        """As `Log.read`. Names in the mailbox that no writer would choose are passed over."""
        letters: list[Letter] = []
        with self._explained("read"):
            for writer, numbers in self._listed(self.name).items():
                segment = self._read.setdefault(writer, _Segment(numbers[0]))
                for line in self._lines(writer, segment, numbers):
                    record = parse_record(writer, line)
                    if record is not None:
                        letters.append((writer, record))
        return letters

    def _lines(self, writer: str, segment: _Segment, numbers: list[int]) -> Iterator[bytes]:
        """Yield whole lines, from where reading stopped, through all segments there are."""
        while True:
            # Known before the file is read: its writer has then written all of it.
            following = next((number for number in numbers if number > segment.number), None)
            path = self._path(writer, segment.number)
            data, missing = _read_from(path, segment.at)
            whole, end, rest = data.rpartition(b"\n")
            lines = whole.split(b"\n") if end else []
            segment.at += len(whole) + len(end)
            if lines and lines[-1] == ENDS:
                lines.pop()
                following = segment.number + 1
            yield from lines
            if following is None:
                return
            if rest:
                report(writer, f"torn after {segment.at} bytes of {path.name}")
            if not missing:
                self._done.append(path)
            segment.number, segment.at = following, 0

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL))

    def trim(self) -> None:
        with self._explained("written"):
            while self._done:
                self._done.pop().unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        with self._mutex, self._explained("written"):
            segment = self._written.get(name)
            if segment is not None and segment.file >= 0:
                self._end(segment)  # it stays known: numbers are not used twice
            for number in self._listed(self.name).get(name, ()):
                self._path(name, number).unlink(missing_ok=True)
            self._read.pop(name, None)
            shutil.rmtree(self._mailbox(name), ignore_errors=True)

    def hurry(self) -> None: ...

    def close(self) -> None:
        with self._mutex:
            for segment in self._written.values():
                if segment.file >= 0:
                    self._end(segment)

    # ------------------------------------------------------------ names

    def _mailbox(self, name: str) -> Path:
        return self.folder / "mailboxes" / require_name("mailbox", name)

    def _path(self, writer: str, number: int) -> Path:
        return self._mailbox(self.name) / f"{writer}.{number:08}.jsonl"

    def _listed(self, mailbox: str) -> dict[str, list[int]]:
        """Return the segments in a mailbox by writer, in order; those of `drop` may be gone."""
        found: dict[str, list[int]] = {}
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._mailbox(mailbox))):
                if (match := FILE.fullmatch(name)) is not None:
                    found.setdefault(match[1], []).append(int(match[2]))
        return found

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DraftcoreError(
                f"the channel's folder {self.folder} cannot be {what}: {error}\n"
                "  free space on its disk, see that nobody removed it, and start again"
            ) from error


def _read_from(path: Path, at: int) -> tuple[bytes, bool]:
    """Return the bytes from an offset to the end, and whether the file is missing."""
    try:
        with path.open("rb") as stream:
            stream.seek(at)
            return stream.read(), False
    except FileNotFoundError:
        return b"", True


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.fsync(file)


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
