"""Files that are written whole or not at all, and a file that only one process holds at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from draftcore.errors import DraftcoreError, UsageError

EXPORT = "draftcore.json"  # the manifest of an export
STEPS = "step-" + 8 * "[0-9]"  # checkpoints' folders; one of another name is not ours


def regular(file: Path) -> Path:
    """Return a file's path. Raises UsageError for a pipe, socket or device, which may have no end."""
    if file.exists() and not (file.is_file() or file.is_dir() or file.samefile(os.devnull)):
        raise UsageError(f"{file} is a pipe, a socket or a device\n  put a file in its place")
    return file


def no_link(path: str | Path, flags: int) -> int:
    """Open a file that is to be written; raises OSError for a link. For `opener` of `open`."""
    return os.open(regular(Path(path)), flags | os.O_NOFOLLOW, 0o666)


def write_atomic(file: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, whatever crashes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def write_sealed(file: Path, data: Mapping[str, Any]) -> None:
    """Write data as JSON whose last key, `digest`, is that of the file's name and the text before it."""
    text, _, _ = json.dumps({**data, "digest": ""}, indent=1).rpartition('"digest"')
    seal = xxhash.xxh3_128_hexdigest((file.name + text).encode())
    write_atomic(file, json.dumps({**data, "digest": seal}, indent=1))


def read_sealed(file: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote; raises ValueError where it was altered since."""
    whole = regular(file).read_text(encoding="utf-8")
    text, _, seal = whole.rpartition('"digest"')
    if seal.strip(': "\n}') != xxhash.xxh3_128_hexdigest((file.name + text).encode()):
        raise ValueError("its digest is not that of what it holds")
    return {key: value for key, value in json.loads(whole).items() if key != "digest"}


def digest(file: Path) -> str:
    """Return the digest of a file's bytes; 10 GB/s from the page cache."""
    with regular(file).open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def altered(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Name the files of a folder that are gone, or have other digests than these."""
    return [n for n in digests if not (folder / n).is_file() or digest(folder / n) != digests[n]]


def require_exported(folder: Path) -> None:
    """Raise DraftcoreError where an export has a manifest and a file is another than that says."""
    if not os.path.exists(manifest := folder / EXPORT):
        return  # an export made by others
    try:
        changed = altered(folder, read_sealed(manifest)["files"])
    except (ValueError, KeyError):
        changed = [EXPORT]
    if changed:
        problem = f"{folder / changed[0]} is not as it was exported: its digest is another"
        remedy = f"export the draft again, or delete {manifest} to have the folder read as it is"
        raise DraftcoreError(f"{problem}\n  {remedy}")


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
    fd = no_link(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").partition("\n")[0]
        os.close(fd)
        raise DraftcoreError(f"{holder} {doing}\n  {remedy}") from None
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd
