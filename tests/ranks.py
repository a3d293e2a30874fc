"""Ranks of a run as real processes, forked from one that has imported everything; and their ports."""

import ipaddress
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from draftcore_disagg.launcher import MEETING

from tests.forks import start_process, take_signals


def start_rank(
    folder: Path, rank: int, size: int, work: Callable[..., Any], *args: Any
) -> ForkServerProcess:
    """Let a rank do some work; what it prints goes to `output.RANK` in the folder."""
    env = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", MEETING: f"{folder / 'meeting'}"}
    env |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    return start_process(_be, env, folder / f"output.{rank}", work, args)


def _be(env: dict[str, str], file: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    take_signals()
    os.environ.update(env)
    torch.set_num_threads(1)
    output = os.open(file, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    work(*args)


def listening(root: int) -> set[tuple[str, int]]:
    """Where a process and those that it started accept connections, as anybody on this machine sees."""
    sockets = set()
    for pid in _family(root):
        with suppress(OSError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it was closed
                    sockets.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                host, _, port = local.partition(":")
                raw = bytes.fromhex(host)  # of words in this machine's order
                packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.add((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))
