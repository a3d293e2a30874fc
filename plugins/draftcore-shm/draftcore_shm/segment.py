"""A file of shared memory that several processes map: slots, and blocks of bytes they stand for.

    page 0    magic, layout, sizes, members; the words that change: used, cursor, committing, time
    columns   state, place, id, ... of every slot, each an array of its own, so that a search for
              an id is one vector scan: 4 us with 256 slots in use, 20 us with 50,000
    journal   the slots of a put that is being committed
    blocks    `capacity` bytes; a slot that is not free owns one contiguous stretch of them

A slot goes FREE, WRITING, HELD, LEAVING, FREE. Only HELD is served; LEAVING was dropped or
superseded while it was read. Blocks are given out from a cursor on, as in a ring, and by first fit
where the cursor meets a block that is still needed. What is free follows from the slots alone, so
no free list can be wrong.

Who is alive is known by locks, never by pid. Byte 0 of the file is the mutex; a member locks byte
1 + its number, and the kernel drops that lock when the process dies, however it dies. What a dead
member was writing is freed, what it was reading is no longer pinned. These are Linux's locks of
open file descriptions: unlike the older kinds they exclude two stores of one process, and closing
another descriptor does not drop them. A mapping keeps its own descriptor's locks alive, so the
locks have a descriptor of their own. A forked child shares them, so it closes that descriptor at
once, and its copy of the store says so.

A process may be killed at any instruction. Each change becomes true by one store to memory; the
exception, a put of several samples that also supersedes others, is noted in the journal first, and
whoever takes the mutex next completes it.

Cost: the mutex takes 2 us, a claim or a search a few scans of the columns in use, and no call
allocates or maps memory. Making a segment costs 0.7 s a GiB (its pages are zeroed, once), opening
one 0.1 s a GiB, which holds nobody up. Stopping a process (SIGSTOP) within the microseconds that it
holds the mutex stops all until it goes on. This module imports no torch.
"""

import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.store import StoreError
from draftcore.errors import UsageError
from draftcore.uris import format_size

UNFINISHED, FINISHED = b"dcshmnew", b"dcshmseg"
LAYOUT = 1
PAGE = 4096
ALIGN = 64
BYTES_PER_SLOT = 16 << 10
ALLOCATE_STEP = 256 << 20  # bytes; an interrupt undoes what one call has claimed
MEMBERS = 256
MUTEX, FIRST_MEMBER = 0, 1  # bytes of the file that are locked
ABANDONED_SECONDS = 600
SLOT_BYTES = 7 * 8 + 4 + 1 + 1 + MEMBERS // 8  # of the columns and the journal
FREE, WRITING, HELD, LEAVING = range(4)


class Word(IntEnum):
    """Places of the header's words of 8 bytes, after the magic."""

    LAYOUT = 1
    CAPACITY = 2
    SLOTS = 3
    USED = 4  # slots from here on were never claimed
    CURSOR = 5  # where the block claimed last ends
    COMMITTING = 6  # how many slots of the journal are becoming HELD
    SECONDS = 7  # when the mutex was last taken, since the epoch


RUN = slice(512, 1024)  # of page 0: the run's name in UTF-8
MEMBER_FLAGS = 1024  # of page 0: one byte for each member that joined and did not leave


@dataclass(frozen=True)
class Claim:
    """What a sample to be written needs: `nbytes` are the tensors', `size` the block's."""

    id: tuple[int, int]
    nbytes: int
    size: int


class FileLocks:
    """Locks on single bytes of a file: the mutex and the members of a segment."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise UsageError(
                "features in shared memory need Linux\n  use another store, e.g. file:"
            )
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self.path = path
        self.fd = os.open(path, flags, 0o600)
        self.forked = False
        _open_locks.add(self)

    def acquire(self, byte: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, byte))

    def try_acquire(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, byte: int) -> None:
        if self.fd >= 0:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))

    def others_hold(self, byte: int, count: int = 1) -> bool:
        """Say whether somebody else, in this process or another, holds any of these bytes."""
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, count))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def removed(self) -> bool:
        """Say whether the path no longer names the file that is locked here."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return True

    @contextmanager
    def mutex(self) -> Iterator[None]:
        try:
            self.acquire(MUTEX)
            yield
        finally:
            self.release(MUTEX)  # harmless where an interrupt came before the lock

    def close(self) -> None:
        """Drop all locks. In a forked child the parent keeps them."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()


_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid, which must be 0
_open_locks: "weakref.WeakSet[FileLocks]" = weakref.WeakSet()


def _flock(kind: int, start: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _forget_in_child() -> None:
    for locks in list(_open_locks):
        locks.forked = True
        locks.close()


os.register_at_fork(after_in_child=_forget_in_child)


class Table:
    """Map a segment: `map` is all of it, and the arrays are views of its parts."""

    def __init__(self, locks: FileLocks) -> None:
        fd = os.open(f"/proc/self/fd/{locks.fd}", os.O_RDWR)  # the same file, another description
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # faulted in now, not page by page in puts
        try:
            self.map = mmap.mmap(fd, os.fstat(fd).st_size, flags=flags)
        finally:
            os.close(fd)
        self.words: NDArray[np.uint64] = np.frombuffer(self.map, np.uint64, PAGE // 8)
        self.members: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8, MEMBERS, MEMBER_FLAGS)
        self.capacity, self.slots = int(self.words[Word.CAPACITY]), int(self.words[Word.SLOTS])
        self._at = PAGE
        self.id_low, self.id_high = self._column(np.uint64), self._column(np.uint64)
        self.attempt_low, self.attempt_high = self._column(np.uint64), self._column(np.uint64)
        self.start, self.size = self._column(np.int64), self._column(np.int64)
        self.nbytes = self._column(np.int64)
        self.journal = self._column(np.uint32)
        self.state, self.owner = self._column(np.uint8), self._column(np.uint8)
        self.readers = self._column(np.uint8, MEMBERS // 8)  # one bit for each member that reads
        assert self._at == PAGE + self.slots * SLOT_BYTES
        self.blocks_at = blocks_at(self.slots)

    @property
    def used(self) -> int:
        return int(self.words[Word.USED])

    def _column(self, dtype: type[np.generic], width: int = 1) -> NDArray[Any]:
        array = np.frombuffer(self.map, dtype, self.slots * width, self._at)
        self._at += array.nbytes
        return array if width == 1 else array.reshape(self.slots, width)


def blocks_at(slots: int) -> int:
    """Return the byte where the blocks begin, behind page 0, the columns and the journal."""
    return PAGE + round_up(slots * SLOT_BYTES, PAGE)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Segment:
    """One member's access to a segment. Call all methods but `exclusive` inside `exclusive`.

    `uri` is what messages call the segment.
    """

    def __init__(self, uri: str, locks: FileLocks, table: Table) -> None:
        """Join as a member; the caller holds the mutex. Raises UsageError if there are too many."""
        self.uri, self.locks, self.table = uri, locks, table
        self._mutex = threading.Lock()  # a file lock does not exclude threads that share it
        self._finish_commit()
        free = (m for m in range(MEMBERS) if locks.try_acquire(FIRST_MEMBER + m))
        self.member = next(free, -1)
        if self.member < 0:
            raise UsageError(
                f"{MEMBERS} processes have the store {uri} open, which is as many as can\n"
                "  close some of them, or use another name for some"
            )
        self._free_all_of(self.member)
        self.table.members[self.member] = 1
        self.collect()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the mutex against all threads and processes. Raises StoreError after leaving."""
        self._require_member()  # a child must not wait for a thread of its parent
        with self._mutex:
            self._require_member()
            with self.locks.mutex():
                self.table.words[Word.SECONDS] = int(time.time())
                self._finish_commit()
                yield

    def _require_member(self) -> None:
        if self.locks.fd < 0:
            forked = "was opened before this process was forked from its parent"
            raise StoreError(
                f"the store {self.uri} {forked if self.locks.forked else 'is closed'}\n"
                "  open it again"
            )

    def require_present(self) -> None:
        """Raise StoreError if somebody removed the file: who opens it now gets another one."""
        if os.fstat(self.locks.fd).st_nlink == 0:
            raise StoreError(
                f"{self.locks.path} was removed while it was in use\n"
                "  end the processes that use it and start them again"
            )

    # ------------------------------------------------------------ writing

    def claim(self, claims: Sequence[Claim], attempt: tuple[int, int]) -> list[int] | None:
        """Return slots in state WRITING, one for each claim, or None where there is no room."""
        table, used = self.table, self.table.used
        spare: list[int] = np.flatnonzero(table.state[:used] == FREE)[: len(claims)].tolist()
        slots = spare + list(range(used, min(used + len(claims) - len(spare), table.slots)))
        starts = self._place([claim.size for claim in claims])
        if starts is None or len(slots) < len(claims):
            return None
        # Before any slot counts, so that a kill in between leaves both of them true.
        table.words[Word.USED] = max(used, *(slot + 1 for slot in slots))
        table.words[Word.CURSOR] = starts[-1] + claims[-1].size
        for slot, start, claim in zip(slots, starts, claims, strict=True):
            table.id_low[slot], table.id_high[slot] = claim.id
            table.attempt_low[slot], table.attempt_high[slot] = attempt
            table.start[slot], table.size[slot] = start, claim.size
            table.nbytes[slot], table.owner[slot] = claim.nbytes, self.member
            table.state[slot] = WRITING
        return slots

    def commit(self, slots: Sequence[int]) -> None:
        """Make claimed slots HELD, all or none; what is held under their ids is superseded."""
        self.table.journal[: len(slots)] = slots
        self.table.words[Word.COMMITTING] = len(slots)
        self._finish_commit()

    def abandon(self, attempt: tuple[int, int]) -> None:
        """Free what a put that failed has claimed."""
        table, used = self.table, self.table.used
        ours = (table.attempt_low[:used] == attempt[0]) & (table.attempt_high[:used] == attempt[1])
        table.state[:used][ours & (table.state[:used] == WRITING)] = FREE

    def _finish_commit(self) -> None:
        table = self.table
        for slot in table.journal[: int(table.words[Word.COMMITTING])].tolist():
            older = self.find((int(table.id_low[slot]), int(table.id_high[slot])))
            if older is not None and older != slot:
                self.drop(older)
            table.state[slot] = HELD
        table.words[Word.COMMITTING] = 0

    def _place(self, sizes: Sequence[int]) -> list[int] | None:
        """Return where blocks of these sizes can begin: at the cursor, or else where they fit."""
        table, used = self.table, self.table.used
        cursor = int(table.words[Word.CURSOR])
        live = table.state[:used] != FREE
        starts = table.start[:used][live]
        ahead = starts[starts >= cursor]
        if cursor + sum(sizes) <= (int(ahead.min()) if ahead.size else table.capacity):
            return list(accumulate(sizes[:-1], initial=cursor))
        order = np.argsort(starts)
        starts, ends = starts[order], (starts + table.size[:used][live])[order]
        return first_fit(sizes, [0, *ends.tolist()], [*starts.tolist(), table.capacity], cursor)

    # ------------------------------------------------------------ reading and dropping

    def find(self, id_: tuple[int, int]) -> int | None:
        """Return the slot that holds an id."""
        table, used = self.table, self.table.used
        hits = (table.id_low[:used] == id_[0]) & (table.state[:used] == HELD)
        for slot in np.flatnonzero(hits).tolist():
            if table.id_high[slot] == id_[1]:
                return int(slot)
        return None

    def pin(self, slot: int) -> None:
        """Keep a slot's block while this member reads it. Members count their own reads."""
        self.table.readers[slot, self.member // 8] |= 1 << self.member % 8

    def unpin(self, slot: int) -> None:
        self.table.readers[slot, self.member // 8] &= 0xFF ^ (1 << self.member % 8)
        if self.table.state[slot] == LEAVING:
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Serve a slot no longer, and free it unless somebody reads it."""
        self.table.state[slot] = LEAVING if self.table.readers[slot].any() else FREE

    # ------------------------------------------------------------ members that died, and leaving

    def collect(self) -> None:
        """Free what only dead members were writing or reading."""
        for member in np.flatnonzero(self.table.members).tolist():
            alive = self.locks.others_hold(FIRST_MEMBER + member)
            if member != self.member and not alive:
                self._free_all_of(member)
        table, used = self.table, self.table.used
        unread = ~table.readers[:used].any(axis=1)
        table.state[:used][(table.state[:used] == LEAVING) & unread] = FREE

    def _free_all_of(self, member: int) -> None:
        """Free what a member was writing, unpin what it was reading, and forget it."""
        table, used = self.table, self.table.used
        writing = (table.state[:used] == WRITING) & (table.owner[:used] == member)
        table.state[:used][writing] = FREE
        table.readers[:used, member // 8] &= 0xFF ^ (1 << member % 8)
        table.members[member] = 0

    def leave(self) -> None:
        """Be a member no longer. The last one to leave removes a segment that holds nothing."""
        self.collect()
        self.table.members[self.member] = 0
        if not self.table.state.any() and not self.locks.others_hold(FIRST_MEMBER, MEMBERS):
            remove(self.locks)
        self.locks.close()
        del self.table  # the mapping goes with the last tensor


def first_fit(
    sizes: Sequence[int], gap_starts: Sequence[int], gap_ends: Sequence[int], cursor: int
) -> list[int] | None:
    """Place blocks in the gaps, those that reach beyond the cursor first; None if one has no place."""
    gaps = [[start, end] for start, end in zip(gap_starts, gap_ends, strict=True) if start < end]
    gaps.sort(key=lambda gap: gap[1] <= cursor)
    starts = []
    for size in sizes:
        gap = next((gap for gap in gaps if gap[1] - gap[0] >= size), None)
        if gap is None:
            return None
        starts.append(gap[0])
        gap[0] += size
    return starts


# ---------------------------------------------------------------- opening, making and removing


def open_segment(path: Path, uri: str, *, max_bytes: int | None, default: int, run: str) -> Segment:
    """Join the segment at `path`, and make it where there is none.

    `max_bytes` and `run` must be those of the processes that use it, unless None and ''. A segment
    that differs and that nobody uses any more is replaced. Raises UsageError.
    """
    while True:
        try:
            locks = FileLocks(path, create=True)
        except OSError as error:
            raise UsageError(
                f"the store {uri} cannot be opened: {error}\n"
                "  use another name, or a file in a folder that exists and is yours"
            ) from error
        try:
            with locks.mutex():
                there = not locks.removed() and _prepare(locks, uri, max_bytes, default, run)
            if there:
                table = Table(locks)  # takes a while, and must not hold up those at work
                with locks.mutex():
                    if not locks.removed():
                        return Segment(uri, locks, table)
        except BaseException:
            locks.close()
            raise
        locks.close()  # it was removed: make another


def remove(locks: FileLocks) -> None:
    """Remove a file whose mutex is held and that nobody is a member of."""
    if not locks.removed():
        locks.path.unlink()


def remove_abandoned(files: Iterable[Path]) -> None:
    """Remove the segments that nobody has open, and had not for a while: what killed runs left."""
    for path in files:
        with suppress(OSError):
            locks = FileLocks(path, create=False)
            try:
                if locks.others_hold(MUTEX, 1 + MEMBERS) or not locks.try_acquire(MUTEX):
                    continue
                if time.time() - _last_used(locks.fd) > ABANDONED_SECONDS:
                    remove(locks)
            finally:
                locks.close()


def _last_used(fd: int) -> float:
    header = os.pread(fd, PAGE, 0)
    if not header.startswith(FINISHED):
        return os.fstat(fd).st_mtime
    return float(np.frombuffer(header, np.uint64)[Word.SECONDS])


def _prepare(locks: FileLocks, uri: str, max_bytes: int | None, default: int, run: str) -> bool:
    """Make or check the segment; return False where another one was in the way and was removed."""
    found, magic = os.fstat(locks.fd), os.pread(locks.fd, len(FINISHED), 0)
    if found.st_uid != os.geteuid():
        raise UsageError(f"{locks.path} belongs to another user\n  use another name")
    if magic in (b"", UNFINISHED):
        _make(locks, uri, round_up(max(default if max_bytes is None else max_bytes, 1), ALIGN), run)
        return True
    header = os.pread(locks.fd, PAGE, 0)
    if magic != FINISHED or len(header) < PAGE:
        raise UsageError(f"{locks.path} is a file of another kind\n  use another name")
    words = np.frombuffer(header, np.uint64)
    capacity, slots = int(words[Word.CAPACITY]), int(words[Word.SLOTS])
    if words[Word.LAYOUT] != LAYOUT:
        raise UsageError(
            f"{locks.path} was made by another version of draftcore: it has layout "
            f"{words[Word.LAYOUT]}, this version reads {LAYOUT}\n"
            "  use one version in all processes; if none uses the file, remove it"
        )
    if found.st_size != blocks_at(slots) + capacity:
        raise UsageError(f"{locks.path} was cut short\n  remove it when no process uses it")
    theirs = header[RUN].rstrip(b"\0").decode()
    other_size = max_bytes is not None and round_up(max_bytes, ALIGN) != capacity
    if not other_size and run in ("", theirs):
        return True
    if locks.others_hold(FIRST_MEMBER, MEMBERS):
        raise UsageError(
            f"the store {uri} is in use by processes that opened it otherwise\n"
            f"  theirs: max_bytes={format_size(capacity)}, run={theirs or 'none'}\n"
            f"  asked:  max_bytes={format_size(capacity if max_bytes is None else max_bytes)}, "
            f"run={run or 'none'}\n"
            "  give the processes of one run the same URI, and each run a name of its own"
        )
    remove(locks)
    return False


def _make(locks: FileLocks, uri: str, capacity: int, run: str) -> None:
    """Write an empty segment with all its memory; its magic, which makes it one, comes last."""
    slots = round_up(max(capacity // BYTES_PER_SLOT, 1024), ALIGN)
    header = bytearray(PAGE)
    words = np.frombuffer(header, np.uint64)
    words[Word.LAYOUT], words[Word.CAPACITY], words[Word.SLOTS] = LAYOUT, capacity, slots
    words[Word.SECONDS] = int(time.time())
    name, size = run.encode(), blocks_at(slots) + capacity
    header[RUN.start : RUN.start + len(name)] = name
    try:
        os.ftruncate(locks.fd, 0)
        if size > shutil.disk_usage(locks.path.parent).free:  # not after it has taken all there is
            raise _too_small(locks.path.parent, uri, size)
        os.pwrite(locks.fd, UNFINISHED, 0)
        # Claims the memory now: merely setting the file's size would bring SIGBUS when it runs out.
        for start in range(0, size, ALLOCATE_STEP):
            os.posix_fallocate(locks.fd, start, min(ALLOCATE_STEP, size - start))
        os.pwrite(locks.fd, header[len(FINISHED) :], len(FINISHED))
        os.pwrite(locks.fd, FINISHED, 0)
    except BaseException as error:
        remove(locks)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(locks.path.parent, uri, size) from error
        raise


def _too_small(folder: Path, uri: str, size: int) -> UsageError:
    free = shutil.disk_usage(folder).free
    return UsageError(
        f"the store {uri} needs {format_size(size)} of memory, and {folder} has "
        f"{format_size(free)} free\n"
        f"  give the store less (max_bytes={format_size(free // 2)}), enlarge {folder} (in Docker "
        "--shm-size), or name a file elsewhere"
    )
