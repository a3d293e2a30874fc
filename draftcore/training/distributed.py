"""The ranks of a run: how they agree, and how the replicas of a draft stay equal.

A run that a launcher or `torchrun` started has several ranks, each with a process and a device of its
own. Each holds a replica of every draft, captures and trains its share of a step's batches, and adds
up gradients with the others: one all-reduce of a flat buffer. One further exchange a step agrees on
the rest (`agree`). Rank 0 alone evaluates and writes checkpoints, metrics and messages.

The ranks of one machine meet in memory that the launcher made, and talk over loopback; those of
several in the store of `torchrun`, a port that a firewall has to keep. gloo's ports accept whoever
connects first, so each rank proves to each that it was at the meeting.

Odd: there are two process groups. `talk` carries what ranks tell each other, on the CPU, and waits
as long as rank 0 works alone, be it an hour of evaluation; `work` carries gradients and waits
`train.rank_timeout`. That a silent rank is dead and not busy, `Watch` knows.

An error that the ranks meet together (`first`, `together`) is raised on all of them, and they may
go on. One that strikes a rank alone ends the run on all.
"""

from __future__ import annotations

import hmac
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from draftcore.config import TrainConfig
from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore.launcher import MEETING
from draftcore.tensors import resolve_device
from draftcore.training.watch import GRACE, SOON, Watch

T = TypeVar("T")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun's
FOREVER = timedelta(days=365)


class Ranks:
    """The ranks of a run, and this one's place; as it stands a single one, which needs nobody."""

    rank, size = 0, 1
    talk: dist.ProcessGroup | None = None
    work: dist.ProcessGroup | None = None
    met: BaseException | None = None  # the last error that all ranks met

    def agree(self, said: T) -> list[T]:
        """Give every rank what each of them says, by rank: small data."""
        found = [said] * self.size
        if self.size > 1:
            dist.all_gather_object(found, said, group=self.talk)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise a DraftcoreError of any rank on all, where the block ends."""
        own = None
        try:
            yield
        except DraftcoreError as error:
            own = error
        for rank, said in enumerate(self.agree((str(own), own.exit_status) if own else None)):
            if said is not None:
                kind = UsageError if said[1] == ExitStatus.REFUSED else DraftcoreError
                self.met = own if own is not None and rank == self.rank else kind(said[0])
                raise self.met

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 do something and give its result, small data, to all."""
        value: T | None = None
        with self.together():
            if self.rank == 0:
                value = work()
        return cast(T, self.agree(value)[0])

    def broadcast(self, tensor: Tensor) -> None:
        """Give a tensor of rank 0, on the CPU, to all, in place."""
        if self.size > 1:
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self.talk)

    def device(self, name: str) -> torch.device:
        """This rank's device: of several ranks, the CPU or the CUDA device of its place on its host."""
        device = resolve_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if device.index is not None or local >= count:
            raise UsageError(
                f"rank {local} of this host asked for device {name!r}, of {count} CUDA devices\n"
                "  set train.device=cuda and start one rank per device: each has one of its own"
            )
        return torch.device("cuda", local)


ALONE = Ranks()


def lay_gradients(parameters: Iterable[Tensor], flats: list[Tensor], at: int = 0) -> None:
    """Let gradients lie in the flat buffer `at`, of which each is a view; makes it if need be.

    The first takes over the gradients that are there.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not flats:
        held = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flats.append(torch.cat([grad.flatten() for grad in held]))
    while len(flats) <= at:
        flats.append(torch.zeros_like(flats[0]))
    parts = torch.split(flats[at], [p.numel() for p in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)


# ---------------------------------------------------------------- several ranks


@contextmanager
def join(config: TrainConfig, *, alone: bool = False) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined until the block ends; a single one without it.

    Raises UsageError where torchrun's environment is not whole, ranks lack a device each or the work
    is for one `alone`; DraftcoreError where they do not come together; on every rank, the error of any.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if alone:
        raise UsageError(
            f"torchrun started {size} ranks, and of all verbs only train knows what to do with them\n"
            "  start this one without torchrun"
        )
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing and MEETING not in os.environ:
        raise UsageError(
            f"WORLD_SIZE is {size}, but the environment lacks {', '.join(missing)}\n"
            "  start ranks with `torchrun --nproc-per-node N -m draftcore train run.yaml`"
        )
    ranks = Group(config, size)
    try:
        with redirect_stdout(io.StringIO() if ranks.rank else sys.stdout):
            yield ranks
    except BaseException as error:
        if error is not ranks.met:
            ranks.leave(error)
            raise
        ranks.close()
        if ranks.rank:  # rank 0 tells it
            raise SystemExit(getattr(error, "exit_status", ExitStatus.FAILED)) from None
        raise
    ranks.close()


class Group(Ranks):
    """One of several ranks."""

    def __init__(self, config: TrainConfig, size: int) -> None:
        self.rank, self.size = int(os.environ["RANK"]), size
        timeout, device = timedelta(seconds=config.rank_timeout), self.device(config.device)
        # gloo keeps whoever connects: files for them, beside those of the run.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # all of them on this machine
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        try:
            if file := os.environ.get(MEETING):
                store: Store = dist.FileStore(file, size)  # type: ignore[attr-defined]
            else:
                store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            self.watch = Watch(store, self.rank, size, config.rank_timeout)
            if self.rank == 0:
                store.set("key", os.urandom(32).hex())
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=size, timeout=timeout
            )
            self.watch.start()
            self.talk = dist.new_group(backend="gloo", timeout=timeout)
            self.work = dist.group.WORLD
            for group in (self.talk, self.work):
                self._prove(group, store.get("key"))
            self.talk.set_timeout(FOREVER)
        except RuntimeError as error:
            raise DraftcoreError(
                f"{size} ranks did not come together within {config.rank_timeout:g} s: {error}\n"
                "  start as many as WORLD_SIZE says, with one MASTER_ADDR that all of them reach"
            ) from None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.work = dist.new_group(backend="nccl", timeout=timeout)

    def _prove(self, group: dist.ProcessGroup | None, key: bytes) -> None:
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
        self.agree(None)
        self.watch.ending.set()
        self.watch.join()
        self.agree(None)  # the store's host goes last
        self.talk = self.work = None
        dist.destroy_process_group()

    def leave(self, error: BaseException) -> None:
        """Part after an error, for the caller to raise; SystemExit where another rank failed before."""
        # torchrun ends the others as soon as one is gone; there is something to say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch, text = self.watch, str(error)
        if not isinstance(error, DraftcoreError):
            text = f"{type(error).__name__}: {error}"
            watch.shorten()  # a collective breaks when a rank ends
            watch.known.wait(2 * SOON)
        if watch.failure is None:
            with suppress(RuntimeError):
                watch.post(self.rank, text, getattr(error, "exit_status", ExitStatus.FAILED))
            watch.known.wait(GRACE)
        if watch.failure is not None and watch.failure.rank != self.rank:
            raise SystemExit(watch.failure.code)
        watch.wait_for_others()
