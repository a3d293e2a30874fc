"""Wrappers that harm the process they run in, at named points, once each: no hook in the product.

    FAULTS="kill:put@2 freeze:leased raise:captured=q7? pace:0.05"  FAULT_MARKS=FOLDER

`kill` is SIGKILL and `freeze` SIGSTOP, to the process itself, when it comes to a point for the
n-th time; a file in the folder marks what was done, so a restarted process passes. Points:

    producer  claimed, captured, put (a batch is written, not renamed), published (before it is
              reported), reported
    trainer   handed (a task, before the reply), taken (a report, before the reply), leased, midstep,
              stepped (before the release), written (a checkpoint, not renamed), unmarked (renamed,
              not marked), saved, freeing, freed

Other faults happen once, too: `full:put` and `full:checkpoint` leave the disk no byte to write,
`twice:publish` reports again, `cut:publish` breaks the connection before a report and
`deaf:publish` before its reply, `torn:publish` dies amid a report, `flip:published` alters a stored
byte. These go on:
`raise:WORD` fails every batch in which a sample begins with the word, `narrow:WORD`, `lacking:WORD` and
`nan:WORD` return something else than was asked for that sample, `pace:SECONDS` slows steps down, and
`ttl:SECONDS` is how long a producer may be silent.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftcore_disagg import tcp
from draftcore_disagg.channel import Client, Json, to_bytes

from draftcore import hookimpl
from draftcore.contracts.capture import CaptureBatch, CapturedBatch
from draftcore.contracts.store import Handle, SampleRef, StoreItem
from draftcore.contracts.target import TargetSpec

FAULTS = [fault.split(":", 1) for fault in os.environ.get("FAULTS", "").split()]
MARKS = Path(os.environ.get("FAULT_MARKS", "/nonexistent"))
Wrapper = Generator[None, Any, Any]
seen: Counter[tuple[str, str]] = Counter()


def now(fault: str, point: str) -> bool:
    """Say whether to do something at this point: once in a run, by one process."""
    for wanted, place in FAULTS:
        name, _, at = place.partition("@")
        if (wanted, name) != (fault, point):
            continue
        seen[fault, place] += 1
        if seen[fault, place] >= int(at or 1):
            try:
                (MARKS / f"{fault}-{place}").open("x").close()
            except FileExistsError:
                continue
            return True
    return False


def reach(point: str) -> None:
    if now("kill", point):
        os.kill(os.getpid(), signal.SIGKILL)
    if now("freeze", point):
        (MARKS / f"frozen-{point}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def word(fault: str) -> str | None:
    """Return the word of a fault that goes on, or None."""
    return next((place for wanted, place in FAULTS if wanted == fault), None)


class Around:
    """An object with some methods replaced."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# ---------------------------------------------------------------- capture


class Capture(Around):
    def __init__(self, inner: Any, target: TargetSpec) -> None:
        super().__init__(inner)
        self.tokenizer = target.load_tokenizer()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for captured in self.inner.features(batches):
            texts = map(self.tokenizer.decode, captured.batch.token_ids)
            for text, features in zip(texts, captured.features, strict=True):
                hit = {fault for fault, begins in FAULTS if begins in text}
                if "raise" in hit:
                    raise RuntimeError(f"no capture of {word('raise')}")
                if "narrow" in hit:
                    features.update({name: value[:, :5] for name, value in features.items()})
                if "lacking" in hit:
                    features.pop("last_hidden")
                if "nan" in hit:
                    features["last_hidden"] = features["last_hidden"].clone()
                    features["last_hidden"][2, 3] = float("nan")
            reach("captured")
            yield captured


@hookimpl(wrapper=True)
def capture(target: TargetSpec) -> Wrapper:
    return Capture((yield), target)


# ---------------------------------------------------------------- store


rename = os.rename  # which Path.rename calls


def rename_shard(source: Any, target: Any, **given: Any) -> None:
    if Path(source).match("shard-*.tmp"):
        reach("put")
    rename(source, target, **given)


vars(os)["rename"] = rename_shard


class Store(Around):
    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        if now("full", "put"):  # no file of this process can grow: as on a full disk
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            try:
                return tuple(self.inner.put_many(items))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        refs: tuple[SampleRef, ...] = self.inner.put_many(items)
        if now("flip", "published"):
            with self.inner.get(refs[0]) as handle:  # its tensors are views of the shared bytes
                handle.tensors["last_hidden"].view(-1)[3] += 1
        reach("published")
        return refs

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        handles: tuple[Handle, ...] = self.inner.get_many(refs, device, names)
        reach("leased")
        return handles

    def free(self, refs: Iterable[SampleRef]) -> None:
        refs = list(refs)
        for point, some in (("freeing", refs[:1]), ("freed", refs[1:])):
            if refs:
                reach(point)
            self.inner.free(some)


@hookimpl(wrapper=True)
def feature_store() -> Wrapper:
    return Store((yield))


# ---------------------------------------------------------------- channel


class Channel(Around):
    def serve(self, service: Any) -> Any:
        service.queue.ttl = float(word("ttl") or service.queue.ttl)
        return self.inner.serve(Served(service))

    def connect(self, find: Callable[[], str]) -> Client:
        return Caller(self.inner.connect(find))


def handed_out(request: Json, reply: Json) -> bool:
    """Whether a reply brings tasks."""
    return request["call"] == "claim" and bool(reply.get("answer", [[]])[0])


class Served(Around):
    """The queue, in the trainer."""

    def answer(self, request: Json) -> Json:
        reply: Json = self.inner.answer(request)
        if handed_out(request, reply):
            reach("handed")
        if request["call"] == "publish":
            reach("taken")
        return reply


class Caller(Around):
    """A producer's way to it."""

    def call(self, request: Json) -> Json:
        publishes = request["call"] == "publish"
        for fault in ("torn", "cut", "deaf") if publishes else ():
            if now(fault, "publish"):
                getattr(self, fault)(to_bytes(request))
        reply: Json = self.inner.call(request)
        if publishes and now("twice", "publish"):
            self.inner.call(request)
        if publishes:
            reach("reported")
        if handed_out(request, reply):
            reach("claimed")
        return reply

    def torn(self, request: bytes) -> None:
        half = request[: len(request) // 2]
        with self.inner.mutex:
            os.write(self.inner.connection.fileno(), len(request).to_bytes(4, "big") + half)
        os.kill(os.getpid(), signal.SIGKILL)

    def cut(self, request: bytes) -> None:
        with self.inner.mutex:
            tcp.shut_down(self.inner.connection)

    def deaf(self, request: bytes) -> None:
        with self.inner.mutex:
            self.inner.connection.send_bytes(request)
            self.inner.connection.recv_bytes()
            tcp.shut_down(self.inner.connection)


@hookimpl(wrapper=True)
def channel() -> Wrapper:
    return Channel((yield))


# ---------------------------------------------------------------- training


@hookimpl(wrapper=True)
def forward_loss() -> Wrapper:
    output = yield
    time.sleep(float(word("pace") or 0))
    reach("midstep")
    return output


@hookimpl
def step_finished(step: int) -> None:
    reach("stepped")


@hookimpl
def checkpoint_saved(step: int) -> None:
    reach("saved")


def watch_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Python itself says which files are opened and renamed."""
    # Not by a full medium: training goes on meanwhile, and what it prints may go to a file, too.
    if event == "os.mkdir" and ".step-" in str(arguments[0]) and now("full", "checkpoint"):
        raise OSError(errno.ENOSPC, "No space left on device")
    if event == "os.rename" and ".step-" in str(arguments[0]):
        reach("written")
    if event == "open" and "/.COMPLETE." in str(arguments[0]) and arguments[2] & os.O_CREAT:
        reach("unmarked")


if FAULTS:
    sys.addaudithook(watch_files)
