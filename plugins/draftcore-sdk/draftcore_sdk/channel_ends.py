"""How the tests of channels open one, and the plan that they run through it.

`Opening` is what a subclass of `channels.ChannelSuite` says of its channel, and the fixtures. Most
tests use both ends as one (`Ends`), with a plan of 4 groups of 2 samples, in steps of 2 samples that
each need two groups:

    group    0: a b    1: c d    2: e f    3: g h
    step     0: a c    1: d b    2: e g    3: h f       (epoch 0; steps 4 to 7 are epoch 1)
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import pytest

from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.channel import CaptureTask, Channel, Credit, PlannedStep, Standing
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.errors import DraftcoreError
from draftcore_sdk.suite import Suite, hooks_of, offer_of, options_of

OpenChannel = Callable[..., "Ends"]
OpenEnd = Callable[..., Channel]
NEVER = 0.3  # seconds after which what has not come will not come
SOON = 20.0  # seconds within which it comes on a busy machine
Found = TypeVar("Found")
GROUPS = ("ab", "cd", "ef", "gh")
STEPS = ("ac", "db", "eg", "hf")
NBYTES = 1000


class Opening(Suite):
    """Opens a channel through its plugin, whole or one of its ends."""

    # ------------------------------------------------------------ what a subclass says

    @pytest.fixture
    def channel_uri(self, tmp_path: Path) -> str:
        """The URI of a fresh channel; by default in a fresh folder."""
        return f"{offer_of(self.plugin, 'channel', self.name).name}:{tmp_path / 'channel'}"

    def with_limits(self, uri: str, refs: int, nbytes: int) -> str:
        """Return the URI of a channel with this much credit."""
        return f"{uri}{'&' if '?' in uri else '?'}limit_refs={refs}&limit_bytes={nbytes}"

    def with_faults(self, uri: str, ttl: float, patience: float, attempts: int) -> str:
        """Return the URI of a shared channel with these times, in seconds, and attempts."""
        faults = f"ttl={ttl}&patience={patience}&attempts={attempts}"
        return f"{uri}{'&' if '?' in uri else '?'}{faults}"

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        """Put records with these bodies into the mailbox of a shared channel's trainer."""
        raise NotImplementedError("override garble: a shared channel must stand malformed records")

    def footprint(self, uri: str) -> int:
        """Return the bytes that a shared channel takes; by default, of the files at its path."""
        path = Path(uri.partition("?")[0].partition(":")[2])
        files = [*path.parent.glob(f"{path.name}*"), *path.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    # ------------------------------------------------------------ fixtures

    @property
    def is_shared(self) -> bool:
        return "shared" in offer_of(self.plugin, "channel", self.name).capabilities

    @pytest.fixture
    def shared(self) -> None:
        if not self.is_shared:
            pytest.skip("no other process reaches the channel (capability shared)")

    @pytest.fixture
    def open_channel(self, channel_uri: str) -> Iterator[OpenChannel]:
        """Open both ends; `refs` and `nbytes` limit its credit. They are closed at the end."""
        opened: list[Ends] = []

        def opener(*, refs: int = 10**6, nbytes: int = 10**12) -> Ends:
            uri, data = self.with_limits(channel_uri, refs, nbytes), self.options
            if self.is_shared:
                uri = self.with_faults(uri, 30, 600, 1)
                trainer = open_through(self.plugin, uri, data, role="trainer")
                opened.append(Ends(trainer, trainer))
                opened[-1].producer = open_through(self.plugin, uri, data, role="producer")
            else:
                channel = open_through(self.plugin, uri, data)
                opened.append(Ends(channel, channel))
            return opened[-1]

        yield opener
        for ends in opened:
            ends.close()

    @pytest.fixture
    def channel(self, open_channel: OpenChannel) -> "Ends":
        return open_channel()

    @pytest.fixture
    def open_end(self, channel_uri: str, shared: None) -> Iterator[OpenEnd]:
        """Open one end of a shared channel, any number of times; all are closed at the end."""
        opened: list[Channel] = []

        def opener(
            role: str,
            *,
            run_id: str = "suite",
            ttl: float = 1,
            patience: float = 60,
            attempts: int = 3,
            refs: int = 10**6,
        ) -> Channel:
            uri = self.with_limits(channel_uri, refs, 10**12)
            uri = self.with_faults(uri, ttl, patience, attempts)
            opened.append(open_through(self.plugin, uri, self.options, run_id, role))
            return opened[-1]

        yield opener
        for end in reversed(opened):
            with suppress(DraftcoreError):  # of an end that a test has made fail
                end.close()


# ---------------------------------------------------------------- both ends as one


class Ends:
    """A channel with both its ends, or one that is both, used as one channel.

    Between processes a message takes its time, which these methods wait for: a claim for its
    answer, a publication until its trainer has taken note of it.
    """

    def __init__(self, trainer: Channel, producer: Channel) -> None:
        self.trainer, self.producer = trainer, producer

    @property
    def both(self) -> bool:
        return self.trainer is self.producer

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        self.trainer.offer(tasks)

    def claim(self, producer: str, wait: float = NEVER) -> CaptureTask | None:
        return self.producer.claim(producer) if self.both else self.producer.claim(producer, wait)

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        before = None if self.both else self.trainer.credit()
        self.producer.publish(task, refs)
        until = time.monotonic() + NEVER
        while before == self.credit() and time.monotonic() < until:
            time.sleep(0.002)

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        return self.trainer.receive(step)

    def received(self, step: PlannedStep) -> tuple[SampleRef, ...]:
        return received(self.trainer, step)

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        return self.trainer.advance(step_index)

    def credit(self) -> Credit:
        return self.trainer.credit()

    def standing(self) -> Standing:
        return self.trainer.standing()

    @property
    def given_up(self) -> Mapping[str, str]:
        return self.trainer.given_up

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        return self.trainer.reject(wrong)

    def wait_for_room(self, task: CaptureTask, wait: float = NEVER) -> bool:
        return self.producer.wait_for_room(task, 0.0 if self.both else wait)

    def evict(
        self, step: PlannedStep, tasks: Iterable[CaptureTask] | None = None
    ) -> tuple[SampleRef, ...]:
        return self.trainer.evict(step, in_order() if tasks is None else tasks)

    def announce(self, about: Mapping[str, str]) -> None:
        self.trainer.announce(about)

    def about(self, wait: float) -> Mapping[str, str]:
        return self.producer.about(wait)

    def close(self, state: str = "finished") -> None:
        self.producer.close(state)
        self.trainer.close(state)


# ---------------------------------------------------------------- pieces of the tests


def open_through(
    plugin: str, uri: str, data: Mapping[str, Any], run_id: str = "suite", role: str = "both"
) -> Channel:
    """Open a channel through its plugin's hook, as a run does."""
    name = uri.partition(":")[0]
    options = options_of(offer_of(plugin, "channel", name), data)
    hook = hooks_of(plugin).channel
    channel = hook(name=name, uri=uri, run_id=run_id, options=options, role=role)
    assert channel is not None, f"{plugin} answers None to channel(name={name!r})"
    return channel


def received(trainer: Channel, step: PlannedStep) -> tuple[SampleRef, ...]:
    """Wait for the refs of a step."""
    return eventually(lambda: trainer.receive(step))


class Process(Protocol):
    """Another process; `errors` ends it and returns what it wrote to stderr."""

    def errors(self) -> str: ...


def eventually(condition: Callable[[], Found | None], *children: Process) -> Found:
    """Wait for a condition and return what it returned."""
    until = time.monotonic() + SOON
    while not (found := condition()):
        if time.monotonic() > until:
            pytest.fail("\n".join(["waited in vain", *(child.errors() for child in children)]))
        time.sleep(0.005)
    return found


class Waiting:
    """Call something in a thread during the `with` block; `result` is what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.result = call, cast(Any, None)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error

    def __enter__(self) -> "Waiting":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(SOON)


def task(epoch: int, group: int) -> CaptureTask:
    members = tuple(GROUPS[group])
    rows = (2 * group, 2 * group + 1)
    return CaptureTask(epoch, CaptureGroup(group, rows, members, padded_length=8))


def in_order() -> list[CaptureTask]:
    """The tasks of the plan from step 0 on."""
    return [task(0, group) for group in range(4)]


def step(index: int) -> PlannedStep:
    epoch, members = index // 4, STEPS[index % 4]
    samples = tuple(SampleId(member, epoch) for member in members)
    return PlannedStep(index, epoch, samples, tuple("abcdefgh".index(m) for m in members))


def ref(feature_id: str, generation: str = "1") -> SampleRef:
    specs = (TensorSpec("x", (5, 100), "bfloat16"),)
    return SampleRef(feature_id, generation, "test:", specs, tokens=5, nbytes=NBYTES)


def refs_of(task: CaptureTask, generation: str = "1") -> tuple[SampleRef, ...]:
    return tuple(ref(member, generation) for member in task.group.feature_ids)


def ids(refs: tuple[SampleRef, ...] | None) -> str:
    assert refs is not None, "the step's samples are not there"
    return "".join(ref.feature_id for ref in refs)


def claimed(channel: Channel) -> CaptureTask:
    task = channel.claim("one")
    assert task is not None, "the channel hands out no task"
    return task


def pumped(channel: Channel, step: PlannedStep, generation: str = "1") -> tuple[SampleRef, ...]:
    """Receive a step as a colocated run does."""
    for _ in range(20):  # more than any test offers: a wrong channel must fail, not hang
        if (refs := channel.receive(step)) is not None:
            return refs
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim, generation))
    pytest.fail(f"step {step.index} is not served, whatever is published")


def publish_all(channel: Channel) -> None:
    channel.offer([task(0, group) for group in range(4)])
    for _ in range(4):
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
