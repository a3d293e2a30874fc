"""The ranks of a run: how they agree, and how the replicas of a draft stay equal.

A run that a launcher or `torchrun` started has several ranks, each with a process and a device of its
own. Each holds a replica of every draft, captures and trains its share of a step's batches, and adds
up gradients with the others: one all-reduce of a flat buffer, which carries the loss's numerator and
denominator as well. One further exchange a step agrees on the rest (`agree`). Rank 0 alone evaluates
and writes checkpoints, metrics and messages. A run of one rank does nothing of all this.

Odd: there are two process groups. `talk` carries what ranks tell each other, on the CPU, and waits
as long as rank 0 works alone, be it an hour of evaluation; `work` carries tensors and waits
`train.rank_timeout`. That a silent rank is dead and not busy, `Watch` knows.

An error that the ranks meet together (`first`, `together`) is raised on all of them, and they may
go on. One that strikes a rank alone ends the run on all.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SAID = 4096  # bytes that a rank says in one exchange


def _same(value: Any) -> Any:
    return value


class Ranks:
    """A run of one rank: nothing to deal out, nothing to agree on, nothing to send."""

    rank, size = 0, 1

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

    def agree(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank what each of them says, by rank: JSON data."""
        return [said]

    # ------------------------------------------------------------ tensors

    def device(self, name: str) -> torch.device:
        """The device of a rank; see `resolve_device`."""
        return resolve_device(name)

    def add_up(self, parameters: Sequence[Tensor], scalars: Tensor) -> Tensor:
        """Sum the replicas' gradients, in place, and `scalars`, [N] in fp32, over the ranks."""
        return scalars

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return values

    def spread(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Give tensors that rank 0 reads to all."""
        return read()

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
    """How a trainer calls its draft, joins the ranks' gradients, and sees its weights: as replicas."""

    every_rank = False  # whether a rank without a batch must take part in the forward

    def __init__(self, ranks: Ranks, draft: Draft, loss: Loss) -> None:
        self.ranks, self.draft, self.loss = ranks, draft, loss

    def __call__(self, batch: DraftBatch, context: StepContext, *, last: bool) -> StepOutput:
        """Return a batch's loss; `last` is true where its backward ends the step's gradient."""
        return self.loss(batch, context)

    def add_up(self, parameters: Sequence[Tensor], scalars: Tensor) -> Tensor:
        """Sum gradients in place, and `scalars`, over the ranks."""
        return self.ranks.add_up(parameters, scalars)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients; those of several ranks keep their place in the flat buffer."""
        optimizer.zero_grad(set_to_none=self.ranks.size == 1)

    def join_norms(self, norm: Tensor) -> Tensor:
        """Return the gradient's norm from that of this rank's part, which is all of it."""
        return norm

    def place(self, value: Tensor, like: Tensor) -> Tensor:
        """Place a tensor of which every rank has the whole as `like` lies."""
        return value.to(like.device)

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
        self._flat: dict[tuple[int, ...], Tensor] = {}  # the gradients of each draft, as one

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
        messages = self.agree(_packed(own) if own else {})
        first = next((rank for rank, message in enumerate(messages) if message), None)
        if own is not None and first == self.rank:
            self._error = own
            raise own
        if first is not None:
            self._raise_told(messages[first])

    def agreed(self, error: BaseException) -> bool:
        return error is self._error

    def agree(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        payload, size = json.dumps(said).encode(), SAID
        while True:  # twice where somebody says more than is usual
            own = len(payload).to_bytes(8, "little") + payload[: size - 8].ljust(size - 8)
            parts = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
            sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            dist.all_gather(parts, sent, group=self.talk)
            found = [bytes(part.numpy()) for part in parts]
            lengths = [int.from_bytes(one[:8], "little") for one in found]
            if max(lengths) <= size - 8:
                pairs = zip(found, lengths, strict=True)
                return [json.loads(one[8 : 8 + length]) for one, length in pairs]
            size = max(lengths) + 8

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

    def add_up(self, parameters: Sequence[Tensor], scalars: Tensor) -> Tensor:
        """The gradients become views of one flat buffer, and stay so: only the first step copies them.

        A rank may lack a gradient that others have, of a weight that its batches did not use.
        """
        trained = [p for p in parameters if p.requires_grad]
        key = tuple(map(id, trained))
        if key not in self._flat:
            size = sum(p.numel() for p in trained) + len(trained) + scalars.numel()
            self._flat[key] = torch.zeros(size, device=self._device)
        flat = self._flat[key]
        at, used = 0, [float(p.grad is not None) for p in trained]
        for parameter in trained:
            view = flat[at : at + parameter.numel()].view_as(parameter)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view
            at += parameter.numel()
        flat[at:] = torch.cat([torch.tensor(used, device=self._device), scalars])
        dist.all_reduce(flat, group=self.work)
        counts = flat[at:].clone()
        for parameter, users in zip(trained, counts[: len(trained)].tolist(), strict=True):
            if not users:  # as one rank would leave it: weight decay passes it over
                parameter.grad = None
        return counts[len(trained) :]

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.work)
        return values

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

    # ------------------------------------------------------------ random states

    def reseed(self, seed: int, step: int) -> None:
        if self.rank:
            mixed = hashlib.sha256(f"{seed} {self.rank} {step}".encode()).digest()
            torch.manual_seed(int.from_bytes(mixed[:4], "little"))  # all that a CPU's takes

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
        self.agree({})
        self.watch.ending.set()
        self.watch.join()
        self.agree({})  # the store's host goes last
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
            gone = Failure(0, f"it kept the ranks' common store, which is gone\n{RESUME}")
            first = self.watch.known or gone
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
