"""The ranks of a run: what each does of a step, and how they agree.

A run that `torchrun` started has several ranks, each with a process and a device of its own. They
train one draft: its weights, gradients and moments are sharded over them, a step's samples are
dealt out in turn, and sums over ranks make the update the one that a single rank would have made.
Rank 0 alone reads the data, talks to the channel, captures, evaluates, and writes checkpoints,
metrics and messages. A run without torchrun is one rank, for which all of this does nothing.

Odd: there are two process groups. `talk` carries what ranks tell each other, on the CPU, and waits
as long as rank 0 works alone, be it an hour of capture; `work` carries tensors and waits
`train.rank_timeout`. That a silent rank is dead and not busy, `Watch` knows.

An error that the ranks meet together (`first`, `together`) is raised on all of them, and they may
go on. One that strikes a rank alone ends the run on all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from draftcore.config import TrainConfig
from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext, StepOutput
from draftcore.errors import DraftcoreError, UsageError
from draftcore.tensors import resolve_device
from draftcore.training.watch import RESUME, Failure, Watch

T = TypeVar("T")
Loss = Callable[[DraftBatch, StepContext], StepOutput]
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREVER = timedelta(days=365)


def _same(value: Any) -> Any:
    return value


class Ranks:
    """A run of one rank: nothing to deal out, nothing to agree on, nothing to send."""

    rank, size = 0, 1

    # ------------------------------------------------------------ a step's samples

    def own(self, total: int) -> range:
        """The positions of this rank's samples in a step of `total`: rank, rank + size, ...

        Samples lie in a step by length, so that ranks get like work.
        """
        return range(self.rank, total, self.size)

    def passes(self, total: int, batch: int) -> list[range]:
        """The positions of each micro-batch; every rank has as many, so the last may be empty."""
        own, count = self.own(total), -(-total // (self.size * batch))
        return [own[at * batch : (at + 1) * batch] for at in range(count)]

    # ------------------------------------------------------------ agreeing

    def first(
        self,
        work: Callable[[], T],
        pack: Callable[[T], Any] = _same,
        unpack: Callable[[Any], T] = _same,
    ) -> T:
        """Let rank 0 do something and give its result, packed as JSON, to all.

        A DraftcoreError of rank 0 is raised on all.
        """
        return work()

    def together(self) -> AbstractContextManager[None]:
        """Raise a DraftcoreError of any rank on all, where the block ends."""
        return nullcontext()

    def agreed(self, error: DraftcoreError) -> bool:
        """Say whether all ranks met this error, so that they may go on after it."""
        return True

    def any(self, flag: bool) -> bool:
        return flag

    def wait(self) -> None:
        """Wait until all ranks are here."""

    # ------------------------------------------------------------ tensors

    def device(self, name: str) -> torch.device:
        """The device of a rank; see `resolve_device`."""
        return resolve_device(name)

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Sum each tensor over the ranks, all in one call."""
        return tensors

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a sharded tensor, in place."""
        return tensor

    def norm(self, norm: Tensor) -> Tensor:
        """Join the norms of the ranks' parts."""
        return norm

    def spread(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Give tensors that rank 0 reads to all."""
        return read()

    def shard(self, value: Tensor, like: Tensor) -> Tensor:
        """Place a tensor of which every rank has the whole as `like` lies."""
        return value.to(like.device)

    def whole(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Put shards together on rank 0, as CPU tensors; the others get nothing."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}

    # ------------------------------------------------------------ random states

    def reseed(self, seed: int, step: int) -> None:
        """Start a random state that differs from other ranks'; rank 0 keeps the one it has."""

    def collect(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' random states by name, those of rank 0 under their plain names."""
        return dict(states)

    def pick(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's random states among what `collect` returned; none if it had none."""
        return {name: states[name] for name in ("rng.cpu", "rng.cuda") if name in states}


class Forward:
    """How a trainer calls its draft, and sees its weights."""

    def __init__(self, draft: Draft, loss: Loss) -> None:
        self.draft, self.loss = draft, loss

    def __call__(self, batch: DraftBatch, context: StepContext, *, last: bool) -> StepOutput:
        """Return a micro-batch's loss; `last` is true where its backward ends the step's gradient."""
        return self.loss(batch, context)

    def whole(self) -> Draft:
        """The draft with its present weights, for evaluation on rank 0."""
        return self.draft


ALONE = Ranks()


# ---------------------------------------------------------------- several ranks


@contextmanager
def join(config: TrainConfig) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined until the block ends; a single one without it.

    Raises UsageError where torchrun's environment is not whole or ranks lack a device each,
    DraftcoreError where they do not come together, and, on every rank, the error of any.
    """
    if several() == 1:
        yield ALONE
        return
    ranks = Group(config)
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere if ranks.rank else sys.stdout),
        ):
            yield ranks
    except BaseException as error:
        ranks.leave(error)
        raise
    ranks.close()


def several() -> int:
    """How many ranks the environment says there are. Raises UsageError where it says it in part."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and (missing := [name for name in ENVIRONMENT if name not in os.environ]):
        raise UsageError(
            f"WORLD_SIZE is {size}, but the environment lacks {', '.join(missing)}\n"
            "  start ranks with `torchrun --nproc-per-node N -m draftcore train run.yaml`"
        )
    return size


def require_one() -> None:
    """Raise UsageError where torchrun started several ranks for work of one."""
    if (size := several()) > 1:
        raise UsageError(
            f"torchrun started {size} ranks, and of all verbs only train knows what to do with them\n"
            "  start this one without torchrun"
        )


class Group(Ranks):
    """One of several ranks."""

    def __init__(self, config: TrainConfig) -> None:
        self.rank, self.size = int(os.environ["RANK"]), several()
        self._device = _own_device(config.device)
        timeout = timedelta(seconds=config.rank_timeout)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            self.watch = Watch(store, self.rank, self.size, config.rank_timeout)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout
            )
        except dist.DistError as error:
            raise DraftcoreError(
                f"{self.size} ranks did not come together within {config.rank_timeout:g} s: {error}\n"
                "  start as many as WORLD_SIZE says, with one MASTER_ADDR that all of them reach"
            ) from None
        self.watch.start()
        cuda = self._device.type == "cuda"
        self.talk = dist.new_group(backend="gloo", timeout=FOREVER)
        self.work = dist.new_group(backend="nccl" if cuda else "gloo", timeout=timeout)
        self._error: BaseException | None = None  # the last that all ranks met
        self._alone = False  # rank 0 at work by itself

    # ------------------------------------------------------------ agreeing

    def first(
        self,
        work: Callable[[], T],
        pack: Callable[[T], Any] = _same,
        unpack: Callable[[Any], T] = _same,
    ) -> T:
        if self.rank:
            message = self._tell(None)
            self._raise_told(message)
            return unpack(message["value"])
        assert not self._alone  # the others would take an inner result for the outer one
        self._alone = True
        try:
            value = work()
        except DraftcoreError as error:
            self._error = error
            self._tell(_packed(error))
            raise
        finally:
            self._alone = False
        self._tell({"value": pack(value)})
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        own = None
        try:
            yield
        except DraftcoreError as error:
            own = error
        if not self.any(own is not None):
            return
        for rank in range(self.size):
            message = self._tell(_packed(own) if own else {}, rank)
            if own is not None and rank == self.rank:
                self._error = own
                raise own
            self._raise_told(message)

    def agreed(self, error: BaseException) -> bool:
        return error is self._error

    def any(self, flag: bool) -> bool:
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.talk)
        return bool(flags)

    def wait(self) -> None:
        self.any(False)

    def _tell(self, data: Any, source: int = 0) -> Any:
        """Send JSON data from one rank to all; returns it on every one."""
        payload = json.dumps(data).encode() if self.rank == source else b""
        length = torch.tensor([len(payload)])
        dist.broadcast(length, source, group=self.talk)
        buffer = bytearray(payload or int(length))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), source, group=self.talk)
        return data if self.rank == source else json.loads(buffer)

    def _raise_told(self, message: Mapping[str, Any]) -> None:
        """Raise the error in another rank's message, if it holds one."""
        if "error" in message:
            kind = UsageError if message["code"] == UsageError.exit_code else DraftcoreError
            self._error = kind(message["error"])
            raise self._error

    # ------------------------------------------------------------ tensors

    def device(self, name: str) -> torch.device:
        return self._device

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([t.detach().to(self._device, torch.double).flatten() for t in tensors])
        dist.all_reduce(flat, group=self.work)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        pairs = zip(parts, tensors, strict=True)
        return tuple(part.reshape(tensor.shape).to(tensor.dtype) for part, tensor in pairs)

    def local(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def norm(self, norm: Tensor) -> Tensor:
        (squares,) = self.sum(norm.double().square())
        return squares.sqrt().to(norm.dtype)

    def spread(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}

        def describe() -> list[Any]:
            held.update(read())
            return [[name, list(t.shape), str(t.dtype)[6:]] for name, t in held.items()]

        for name, shape, dtype in self.first(describe):
            if self.rank:
                held[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(held[name].reshape(-1).view(torch.uint8), 0, group=self.talk)
        return held

    def shard(self, value: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        value = value.to(like.device)
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def whole(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        from torch.distributed.tensor import DTensor

        found = {}
        for name, tensor in tensors:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                found[name] = full.detach().cpu().contiguous()
        return found

    # ------------------------------------------------------------ random states

    def reseed(self, seed: int, step: int) -> None:
        if self.rank:
            torch.manual_seed((seed + (self.rank << 32) + step) % (1 << 63))

    def collect(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, state in states.items():
            parts = [torch.empty_like(state) for _ in range(self.size)]
            dist.all_gather(parts, state, group=self.talk)
            found |= {f"{name}.{rank}" if rank else name: part for rank, part in enumerate(parts)}
        return found

    def pick(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tail = f".{self.rank}" if self.rank else ""
        own = {name: f"{name}{tail}" for name in ("rng.cpu", "rng.cuda")}
        return {name: states[key] for name, key in own.items() if key in states}

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Part when all ranks are here."""
        self.wait()
        self.watch.ending.set()
        self.watch.join()
        self.wait()  # the store's host goes last
        dist.destroy_process_group()

    def leave(self, error: BaseException) -> None:
        """Part after an error, which the caller raises where it is this rank's to tell.

        Raises SystemExit in its place where another rank tells it, or another failed before.
        """
        code = getattr(error, "exit_code", 1)
        if self.agreed(error):
            self.close()
            if self.rank:
                raise SystemExit(code)
            return
        # torchrun ends the others as soon as one is gone; there is something to say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        explained = isinstance(error, DraftcoreError)
        text = str(error) if explained else f"{type(error).__name__}: {error}"
        broken = isinstance(error, Exception) and not explained  # perhaps by another rank's end
        try:
            first = (self.watch.culprit() if broken else None) or self.watch.post(text, code)
        except dist.DistError:
            first = Failure(0, f"it kept the ranks' common store, which is gone\n{RESUME}")
        if first.text != text:
            self.watch.report(first)
        elif first.rank == self.rank:
            time.sleep(2 * self.watch.interval)  # for all to read it: the store may go with us
            return
        raise SystemExit(first.code)


def _packed(error: DraftcoreError) -> dict[str, Any]:
    return {"error": str(error), "code": error.exit_code}


def _own_device(name: str) -> torch.device:
    """This rank's device: the CPU, or the CUDA device of its place on this host."""
    device, local = resolve_device(name), int(os.environ["LOCAL_RANK"])
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if device.index is not None or local >= count:
        raise UsageError(
            f"rank {local} of this host asked for device {name!r}, and {count} CUDA devices are here\n"
            "  each rank has a device of its own: set train.device=cuda and start one rank per device"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
