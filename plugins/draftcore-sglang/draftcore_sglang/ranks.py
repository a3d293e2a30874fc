"""Run a target on several devices: one process per rank, all with the same prompts.

No rank lives in the process of the run. A rank that dies while others wait for it inside a
collective would take the run along, and torch.distributed has one default group per process, which
a trainer's checkpoints must not find occupied by sglang's ranks. Rank 0 hands its tensors over where
they are: on the device through CUDA's inter-process handles, on the CPU through shared memory.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.multiprocessing
from draftcore_disagg.local import free_port
from torch import Tensor

from draftcore.errors import DraftcoreError
from draftcore_sglang.internals import Limits, Pictures, Runner, Settings


class Ranks:
    """The processes of all ranks; where one fails or dies, all are ended.

    Raises DraftcoreError where they cannot start. Once they have run, it is RuntimeError: no batch is
    at fault, and only a process begun anew has an engine again.
    """

    def __init__(self, settings: Settings) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.path, self.failure = settings.path, ""
        # Where ranks meet: memory that no other user can open, and that goes with this process.
        self.memory = os.fdopen(os.memfd_create("draftcore-sglang"))
        meeting = f"/proc/{os.getpid()}/fd/{self.memory.fileno()}"
        port = free_port()  # nobody listens there: sglang names shared memory by it
        for rank in range(settings.tp):
            here, there = context.Pipe()
            given = (settings, rank, port, meeting, there)
            process = context.Process(target=serve, args=given, daemon=True, name=f"sglang-{rank}")
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        try:
            self.limits: Limits = self._answers()
        except RuntimeError as error:
            raise DraftcoreError(str(error)) from None

    def forward(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int], pictures: Pictures
    ) -> dict[str, Tensor]:
        """As `Runner.forward`; rank 0's result is returned."""
        if self.failure:
            raise RuntimeError(self.failure)
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((prompts, layers, pictures))
            except OSError:
                self._fail(rank, "it ended and gave no reason")
        found: dict[str, Tensor] = self._answers()
        # A copy: what was handed over is the rank's memory, and goes when it goes.
        return {name: value.clone() for name, value in found.items()}

    def _answers(self) -> Any:
        """Wait for an answer of every rank and return rank 0's."""
        answers: dict[int, Any] = {}
        while missing := [rank for rank in range(len(self.pipes)) if rank not in answers]:
            ready = wait([self.pipes[rank] for rank in missing])
            for rank in missing:
                if self.pipes[rank] in ready:
                    answers[rank] = self._answer(rank)
        return answers[0]

    def _answer(self, rank: int) -> Any:
        try:
            failed, answer = self.pipes[rank].recv()
        except (EOFError, OSError):
            self._fail(rank, "it ended and gave no reason")
        if failed:
            self._fail(rank, answer)
        return answer

    def _fail(self, rank: int, reason: str) -> NoReturn:
        self.processes[rank].join(1)  # else its exit status would be that of being killed below
        killed = [at for at, process in enumerate(self.processes) if (process.exitcode or 0) < 0]
        if killed and rank not in killed:  # this one only lost its connection to that one
            rank, reason = killed[0], "it was killed"
        process = self.processes[rank]
        self.close()
        self.failure = (
            f"sglang's engine of {self.path!r} has ended: rank {rank} of {len(self.pipes)} failed: "
            f"{reason}\n  (process {process.pid}, exit status {process.exitcode}); all ranks were ended"
        )
        raise RuntimeError(self.failure)

    def close(self) -> None:
        """End all ranks, by force: they hold nothing but device memory."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.memory.close()


def serve(settings: Settings, rank: int, port: int, meeting: str, pipe: Connection) -> None:
    """Be one rank: answer with what a forward returns until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the run decides on it
    try:
        runner = Runner(settings, rank, port, meeting)
        pipe.send((False, runner.limits))
        while True:
            found = runner.forward(*pipe.recv())
            pipe.send((False, found if rank == 0 else None))
    except EOFError:
        sys.exit(0)
    except Exception as error:
        pipe.send((True, str(error)))
        sys.exit(1)
