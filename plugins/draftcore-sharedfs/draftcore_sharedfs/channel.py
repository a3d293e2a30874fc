"""Channel `dir`: the queue behind files in a folder, for machines that share a mount and no network.

    FOLDER/head.json                     names the trainer's START of now; none once it has closed
    FOLDER/START/NAME.requests.000001    lines that the client NAME appends
    FOLDER/START/NAME.replies.000001     lines that the trainer appends: the n-th answers the n-th

A line is `["MAC",message]`. The MAC, HMAC-SHA256 with the run's secret, covers START, the file's name
and the line's number, so a line of another run, client or time passes nowhere. A line that is torn, or
that a network file system shows with holes, is looked at again until it is whole.

A file of SEGMENT bytes ends in `null`. The next one is there by then and is asked for by name, as a
network file system may list a new name late; the reader removes the one that it has read.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftcore_disagg.channel import PATIENCE, ChannelAway, Client, Json, Service, to_bytes

from draftcore.errors import UsageError
from draftcore.files import regular
from draftcore.uris import parse_uri

logger = logging.getLogger(__name__)
SEGMENT = 1 << 20  # bytes
LONGEST = 64 << 20  # bytes of a line
NEXT, FAREWELL = b"null\n", b"{}"
LOOK = 0.05  # seconds between two looks at a file
SLOW = 1.0  # the same where nothing was heard for BUSY seconds
BUSY = 10.0


def seal(key: bytes, number: int, message: bytes) -> bytes:
    mac = hmac.new(key, b"%d " % number + message, "sha256").hexdigest()
    return b'["%s",%s]\n' % (mac.encode(), message)


def unseal(key: bytes, number: int, line: bytes) -> Any:
    """Return the message in a line, None where the line is not whole or not the run's."""
    message = line[68:-2]
    whole = hmac.compare_digest(line, seal(key, number, message))
    return json.loads(message) if whole else None


class Lines:
    """The requests of one client, or the replies to it: one end writes them, the other one reads."""

    def __init__(self, folder: Path, name: str, secret: bytes) -> None:
        self.folder, self.name = folder, name
        self.key = hmac.digest(secret, f"{folder.name}/{name}".encode(), "sha256")
        self.segment, self.at, self.number = 1, 0, 0

    def path(self, segment: int) -> Path:
        return self.folder / f"{self.name}.{segment:06}"

    def open(self, segment: int, flags: int = 0) -> int:
        """Open a file to write. Raises OSError for a link, which no end of the channel makes."""
        return os.open(self.path(segment), os.O_WRONLY | os.O_NOFOLLOW | flags, 0o666)

    def begin(self, segment: int) -> None:
        os.close(self.open(segment, os.O_CREAT))

    def write(self, message: bytes) -> None:
        """Append a line. After an OSError it may be called again, and writes over what it wrote."""
        if self.at >= SEGMENT:
            self.begin(self.segment + 1)
            self._put(NEXT)
            self.segment, self.at = self.segment + 1, 0
        line = seal(self.key, self.number, message)
        self._put(line)
        self.at, self.number = self.at + len(line), self.number + 1

    def read(self) -> Json | None:
        """Return the next line's message, None while that is not there."""
        with regular(self.path(self.segment)).open(
            "rb"
        ) as stream:  # anew: so a mount shows what is new
            stream.seek(self.at)
            line = stream.readline(LONGEST)
        if line == NEXT:
            self.path(self.segment).unlink(missing_ok=True)
            self.segment, self.at = self.segment + 1, 0
            return self.read()
        message: Json | None = unseal(self.key, self.number, line)
        if message is not None:
            self.at, self.number = self.at + len(line), self.number + 1
        return message

    def _put(self, line: bytes) -> None:
        file, done = self.open(self.segment), 0
        try:
            while done < len(line):
                done += os.pwrite(file, memoryview(line)[done:], self.at + done)
        finally:
            os.close(file)  # a network file system sends what was written now


class DirChannel:
    """Either end of a channel in `folder`."""

    def __init__(self, folder: Path, secret: bytes, patience: float) -> None:
        self.folder, self.secret, self.patience = folder, secret, patience
        self.key = hmac.digest(secret, b"head", "sha256")
        self.start = ""  # of the trainer here, until it closes
        self.closing = threading.Event()
        self.threads: list[threading.Thread] = []

    @classmethod
    def open(cls, uri: str, secret: bytes, patience: float = PATIENCE) -> DirChannel:
        path = parse_uri(uri).path
        if not path:
            raise UsageError(f"the channel {uri!r} names no folder\n  write dir:FOLDER")
        return cls(Path(path).expanduser(), secret, patience)

    def serve(self, service: Service) -> str:
        self.start = f"start-{uuid.uuid4().hex}"
        try:
            self.head()  # raises for another run's
            (self.folder / self.start).mkdir(parents=True)
            for old in self.folder.glob("start-*"):  # of earlier trainers
                if old.name != self.start:
                    shutil.rmtree(old, ignore_errors=True)
            self._set_head(self.start)
        except OSError as error:
            raise UsageError(
                f"the channel cannot use the folder {self.folder}: {error}\n"
                "  name a folder of this run's own that its user may write"
            ) from None
        self._begin(self._accept, service)
        return self.start

    def connect(self, find: Callable[[], str]) -> Client:
        return DirClient(self, find)

    def close(self) -> None:
        self.closing.set()
        for thread in self.threads:
            thread.join(1.0)  # for a reply that is being written
        start, self.start = self.start, ""
        with suppress(OSError):
            if start and self.head() == start:  # no later trainer has begun
                self._set_head("")

    def head(self) -> str:
        """Return the START of the trainer of now, '' while there is none. Raises OSError."""
        try:
            line = regular(self.folder / "head.json").read_bytes()
        except FileNotFoundError:
            return ""
        head = unseal(self.key, 0, line)
        if head is None:
            raise OSError("its head.json is of another run, or this end has another secret")
        return str(head["start"])

    def _set_head(self, start: str) -> None:
        fresh = self.folder / f".head.{uuid.uuid4().hex}"
        fresh.write_bytes(seal(self.key, 0, to_bytes({"start": start})))
        fresh.replace(self.folder / "head.json")

    def _begin(self, work: Callable[..., None], *given: object) -> None:
        self.threads.append(threading.Thread(target=work, args=given, name="queue", daemon=True))
        self.threads[-1].start()

    def _accept(self, service: Service) -> None:
        """Begin a thread for each client that is new in the folder."""
        known: set[str] = set()
        while not self.closing.wait(LOOK):
            with suppress(OSError):  # the mount is away: it is listed again
                for file in os.listdir(self.folder / self.start):
                    name, _, kind = file.partition(".")
                    if kind == "requests.000001" and name not in known:
                        known.add(name)
                        self._begin(self._answer, name, service)

    def _answer(self, name: str, service: Service) -> None:
        """Answer one client's requests in order, to its farewell."""
        requests, replies = lines_of(self.folder / self.start, name, self.secret)
        producer, reply, heard = "", b"", time.monotonic()
        while not self.closing.wait(LOOK if time.monotonic() - heard < BUSY else SLOW):
            try:
                if not reply and (request := requests.read()) is not None:
                    if not request:
                        return service.lost(producer)
                    producer = str(request.get("producer", ""))
                    reply, heard = to_bytes(service.answer(request)), time.monotonic()
                if reply and self.start:
                    replies.write(reply)
                    reply = b""
            except OSError as error:  # the mount is away or full: tried again at the next look
                logger.debug("%s cannot be read or written: %s", self.folder, error)


class DirClient:
    """A producer's files, begun anew at each START of the trainer."""

    def __init__(self, channel: DirChannel, find: Callable[[], str]) -> None:
        self.channel, self.find, self.start = channel, find, ""
        self.mutex, self.closed = threading.Lock(), threading.Event()

    def call(self, request: Json) -> Json:
        message, began, sent = to_bytes(request), time.monotonic(), ""
        with self.mutex:
            while not self.closed.is_set():
                self.find()  # raises where this process is asked to stop; the head has the address
                try:
                    start = self.channel.head()
                    if start and start != sent:
                        if start != self.start:
                            self._begin(start)
                        self.requests.write(message)
                        sent = start
                    reply = self.replies.read() if sent else None
                    if reply is not None and self.replies.number == self.requests.number:
                        return reply
                    why = "it is silent" if start else "there is none"
                except OSError as error:
                    why = str(error)
                if time.monotonic() - began > self.channel.patience:
                    raise ChannelAway(
                        f"the trainer's queue in {self.channel.folder} did not answer for "
                        f"{self.channel.patience:g} s: {why}\n"
                        "  start the trainer, or give the producer its folder and secret"
                    )
                self.closed.wait(LOOK)
        raise ChannelAway("this end of the channel is closed")

    def close(self) -> None:
        self.closed.set()
        with self.mutex, suppress(OSError):
            if self.start:
                self.requests.write(FAREWELL)

    def _begin(self, start: str) -> None:
        folder, name = self.channel.folder / start, uuid.uuid4().hex
        self.requests, self.replies = lines_of(folder, name, self.channel.secret)
        self.replies.begin(1)  # before it is looked for: mounts remember what is missing
        self.requests.begin(1)
        self.start = start


def lines_of(folder: Path, name: str, secret: bytes) -> tuple[Lines, Lines]:
    """Return a client's requests and the replies to them."""
    return Lines(folder, f"{name}.requests", secret), Lines(folder, f"{name}.replies", secret)
