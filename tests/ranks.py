"""Ranks of a run as real processes, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # which the children take over, to find `tests`
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.ranks",
        "draftcore.run",
        "torch.distributed.fsdp",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


def start_rank(
    folder: Path, rank: int, size: int, port: int, work: Callable[..., Any], *args: Any
) -> ForkServerProcess:
    """Let a rank do some work; what it prints goes to `output.RANK` in the folder."""
    env = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "GLOO_SOCKET_IFNAME": "lo"}
    process = CONTEXT.Process(target=_be, args=(env, folder / f"output.{rank}", work, args))
    process.start()
    return process


def _be(env: dict[str, str], file: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    output = os.open(file, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    work(*args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
