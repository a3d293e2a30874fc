"""Files that are written whole or not at all, and a file that only one process holds at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from draftcore.errors import DraftcoreError


def write_atomic(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, whatever crashes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold(file: Path, doing: str, remedy: str) -> int:
    """Lock a file and return the descriptor that holds the lock until it is closed or its holder ends.

    Raises DraftcoreError, which says who is `doing` it, where another process holds the lock.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace")
        os.close(fd)
        raise DraftcoreError(f"{holder} {doing}\n  {remedy}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd
