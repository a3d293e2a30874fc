"""The ranks of a run: what they do together, and how each learns that another failed or is lost.

A run that a launcher or `torchrun` started has several ranks, each with a process and a device of its
own. Each holds a replica of every draft, captures and trains its share of a step's batches, and adds
up gradients with the others: one all-reduce of a flat buffer. One `all_gather` a step agrees on the
rest. Rank 0 alone evaluates and writes checkpoints, metrics and messages.

The ranks of one machine meet in memory that the launcher made, and talk over loopback; those of
several in the store of `torchrun`, a port that a firewall has to keep. gloo's ports accept whoever
connects first, so each rank proves to each that it was at the meeting.

Odd: collectives on the CPU have no timeout, as rank 0 may work alone, be it an hour of evaluation,
and as features may be late. Whether a rank that is waited for is busy or dead, `Heartbeat` knows.
"""

from __future__ import annotations

import hmac
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import Ranks
from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore.tensors import resolve_device
from draftcore_disagg.launcher import MEETING

T = TypeVar("T")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun's
NO_TIMEOUT = timedelta(days=365)
BEAT_EVERY = 0.5  # seconds between two heartbeats
UNWIND = 5.0  # seconds for a main thread to end by itself once the run has failed


class Group(Ranks):
    """One of several ranks, which talk by torch.distributed; see `contracts.run.Ranks`."""

    cpu_group: dist.ProcessGroup | None = None

    def __init__(self, config: Any) -> None:
        size = int(os.environ["WORLD_SIZE"])
        missing = [name for name in ENVIRONMENT if name not in os.environ]
        if missing and MEETING not in os.environ:
            raise UsageError(
                f"WORLD_SIZE is {size}, but the environment lacks {', '.join(missing)}\n"
                "  start ranks with `torchrun --nproc-per-node N -m draftcore train run.yaml`"
            )
        self.rank, self.size = int(os.environ["RANK"]), size
        timeout, device = timedelta(seconds=config.rank_timeout), self.device(config.device)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # all of them on this machine
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        try:
            if file := os.environ.get(MEETING):
                store: Store = dist.FileStore(file, size)  # type: ignore[attr-defined]
            else:
                store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            if self.rank == 0:
                store.set("key", os.urandom(32).hex())
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=size, timeout=timeout
            )
            cpu_group = cast(dist.ProcessGroup, dist.group.WORLD)
            beat_group = dist.new_group(backend="gloo", timeout=timeout)
            for group in (cpu_group, beat_group):
                self._prove(group, store.get("key"))
            cpu_group.set_timeout(NO_TIMEOUT)
        except RuntimeError as error:
            raise DraftcoreError(
                f"{size} ranks did not come together within {config.rank_timeout:g} s: {error}\n"
                "  start as many as WORLD_SIZE says, with one MASTER_ADDR that all of them reach"
            ) from None
        self.heartbeat = Heartbeat(self, beat_group, timeout)
        self.heartbeat.start()
        self.cpu_group = self.device_group = cpu_group
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.device_group = dist.new_group(backend="nccl", timeout=timeout)

    def all_gather(self, value: T) -> list[T]:
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        mine = None
        try:
            yield
        except DraftcoreError as error:
            mine = error
        errors = self.all_gather((str(mine), mine.exit_status) if mine else None)
        for rank, raised in enumerate(errors):
            if raised is not None:
                kind = UsageError if raised[1] == ExitStatus.REFUSED else DraftcoreError
                self.last_common_error = mine if mine and rank == self.rank else kind(raised[0])
                raise self.last_common_error

    def on_rank0(self, work: Callable[[], T]) -> T:
        value: T | None = None
        with self.raise_on_all():
            if self.rank == 0:
                value = work()
        return cast(T, self.all_gather(value)[0])

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self.cpu_group)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.device_group)

    def shard(
        self, hook: Any, draft: Draft, options: Any, evaluated: bool,
        trained_tensors: Callable[[Draft, int], Mapping[str, Tensor]],
    ) -> Any:  # fmt: skip
        from draftcore_disagg.sharding import Sharded  # 1.6 s that others do not pay

        return Sharded(hook, draft, options, self, evaluated, trained_tensors)

    def device(self, name: str) -> torch.device:
        """This rank's device: the CPU or the CUDA device of its place on its host."""
        device = resolve_device(name)
        if device.type != "cuda":
            return device
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if device.index is not None or local >= count:
            raise UsageError(
                f"rank {local} of this host asked for device {name!r}, of {count} CUDA devices\n"
                "  set train.device=cuda and start one rank per device: each has one of its own"
            )
        return torch.device("cuda", local)

    def _prove(self, group: dist.ProcessGroup, key: bytes) -> None:
        """Show each rank that this one knows the key. Raises DraftcoreError where another does not."""
        pairs = [(a, b) for a in range(self.size) for b in range(self.size)]
        made = [list(hmac.digest(key, b"%d to %d" % pair, "sha256")) for pair in pairs]
        proofs_RRD = torch.tensor(made, dtype=torch.uint8).view(self.size, self.size, -1)
        found_RD = torch.empty_like(proofs_RRD[0])
        dist.all_to_all_single(found_RD, proofs_RRD[self.rank], group=group)
        if not torch.equal(found_RD, proofs_RRD[:, self.rank]):
            raise DraftcoreError(
                f"another process than a rank of this run answered rank {self.rank}\n"
                "  start the same command again; no other user should reach the ports of a run"
            )

    def close(self) -> None:
        """Part when all ranks are here.

        The groups end with their last reference: threads of theirs that outlive the interpreter may
        abort the process.
        """
        self.heartbeat.ending.set()
        self.heartbeat.join()
        self.cpu_group = self.device_group = self.heartbeat.group = None
        dist.destroy_process_group()

    def leave(self, error: BaseException) -> None:
        """Part after an error, for the caller to raise; SystemExit where another rank failed before."""
        # torchrun ends the others as soon as one is gone; there is something to say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        name = "" if isinstance(error, DraftcoreError) else f"{type(error).__name__}: "
        failure = Failure(
            self.rank, f"{name}{error}", getattr(error, "exit_status", ExitStatus.FAILED)
        )
        self.heartbeat.own_failure = failure
        self.heartbeat.ending.set()
        self.heartbeat.failure_known.wait(UNWIND)
        failure = self.heartbeat.failure or failure
        if failure.rank != self.rank:
            raise SystemExit(failure.code)


class Failure(NamedTuple):
    """Why the run ends: the rank that failed, None for one that is lost, its error, the exit status."""

    rank: int | None
    text: str
    code: int


class Heartbeat(threading.Thread):
    """Meets the other ranks twice a second, in a thread and a process group of its own.

    A rank that does not come there within `train.rank_timeout` was killed or frozen; one that is busy
    comes. A rank that failed says so there. Then all end: a main thread that still waits in a
    collective, where it cannot be woken, is ended with its process.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(name="draftcore-heartbeat", daemon=True)
        self.rank, self.size, self.timeout = ranks.rank, ranks.size, timeout
        self.group: dist.ProcessGroup | None = group
        self.ending, self.failure_known = threading.Event(), threading.Event()
        self.own_failure: Failure | None = None  # this rank's
        self.failure: Failure | None = None  # the run's, once it is known

    def run(self) -> None:
        answers: list[tuple[bool, Failure | None]] = [(False, None)] * self.size
        while not all(ending for ending, _ in answers):
            self.ending.wait(min(BEAT_EVERY, self.timeout.total_seconds() / 4))
            try:
                dist.monitored_barrier(self.group, self.timeout)  # which names who did not come
                answer = self.ending.is_set(), self.own_failure
                dist.all_gather_object(answers, answer, group=self.group)
            except RuntimeError as error:
                text = f"it was killed or frozen, or its host is lost: {str(error).splitlines()[0]}"
                remedy = "start the same command again: the run goes on from its last checkpoint"
                return self.end(Failure(None, f"{text}\n{remedy}", ExitStatus.RANK_LOST))
            for failure in [failure for _, failure in answers if failure]:
                return self.end(failure)

    def end(self, failure: Failure) -> None:
        """Say why the run ends, and end this process where its main thread does not.

        Of the ranks that did not fail one says it, or all would; of a rank that is lost all do.
        """
        self.failure = failure
        if failure.rank is None or self.rank == (1 if failure.rank == 0 else 0):
            name = "another rank" if failure.rank is None else f"rank {failure.rank}"
            text = failure.text.replace("\n", "\n  ")
            print(f"error: {name} failed\n  {text}", file=sys.stderr, flush=True)
        self.failure_known.set()
        time.sleep(UNWIND)
        os._exit(failure.code)
