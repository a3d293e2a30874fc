"""All processes of one run on one machine: producers, ranks of the trainer, and who restarts them.

It imports no torch and holds no state that matters: the checkpoint and the plan say
where the run stands, so any process may be killed, this one too, and the same command goes on. A
producer that dies is started again alone; ranks only together, as their collectives break together.
Children get a signal from the kernel when the launcher dies, so none is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore.files import no_link, regular
from draftcore_disagg.launcher import MEETING, Job, verdict

PR_SET_PDEATHSIG = 1
POLL_EVERY = 0.1  # seconds between two polls of the children
STOP_TIMEOUT = 30.0  # seconds in which a child may end by itself after it was asked to
# What a line of a log says that names an error.
ERROR = re.compile(r"(?:^|\s)((?:[\w.]*Error|[\w.]*Exception): .*)")


@dataclass
class Child:
    """One process of the run, and how often it was started again."""

    name: str
    command: Sequence[str]
    log: Path | None = None  # None: the launcher's own output
    env: dict[str, str] = field(default_factory=dict)
    fds: Sequence[int] = ()  # that it inherits
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            output: Any = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(self.log, "ab", opener=no_link))
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                pass_fds=self.fds,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    @property
    def code(self) -> int | None:
        """The exit status; negative for a signal; None while it runs."""
        return self.process.poll() if self.process is not None else None

    def send(self, number: int) -> None:
        if self.process is not None and self.code is None:
            self.process.send_signal(number)

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, for an error."""
        return "\n".join(f"  {line}" for line in self._text().splitlines()[-lines:])

    def errors(self, most: int) -> list[str]:
        """Return the last errors that its log names, each once."""
        return [*dict.fromkeys(ERROR.findall(self._text()))][-most:]

    def end(self, seconds: float) -> None:
        """Ask it and all that it started to end, and force that after so many seconds; harmless twice."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _text(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        return regular(self.log).read_text(encoding="utf-8", errors="replace")


class LocalLauncher:
    """The built-in launcher, `local`: all processes on this machine."""

    def run(self, job: Job) -> int:
        env = devices(job.ranks, job.producers, job.devices)
        names = [f"rank {rank}" for rank in range(job.ranks)]
        ranks = [Child(name, job.of("trainer"), env=env.get(name, {})) for name in names]

        def producer(number: int) -> Child:
            gpus = env.get(f"producer {number % job.producers}", {})
            log = job.folder / "logs" / f"producer-{number}.log"
            return Child(f"producer {number}", job.of("producer"), log, env=gpus)

        producers = list(map(producer, range(job.producers)))
        return Processes(ranks, producers, job.restarts, producer, job.wanted).run()


@dataclass
class Processes:
    """Starts the children of a run, keeps them alive, and returns the trainer's exit status."""

    ranks: Sequence[Child]
    producers: list[Child]
    restarts: int  # of each child
    make_producer: Callable[[int], Child] | None = None  # of this number
    target_count: Callable[[], int] | None = None  # how many producers there should be now
    stopping: list[Child] = field(default_factory=list)  # producers that were asked to go
    asked: bool = False  # by a signal, to stop

    def run(self) -> int:
        """Run until the trainer ends. Raises DraftcoreError where a child cannot be kept alive."""
        code: int | None = None
        with contextlib.ExitStack() as handlers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # by nohup
                handlers.callback(signal.signal, number, signal.signal(number, self._ask))
            try:
                self._start_ranks()
                for child in self.producers:
                    child.start()
                while (code := self._watch_ranks()) is None:
                    self._watch_producers()
                    time.sleep(POLL_EVERY)
                return code
            finally:
                end(self.ranks, 1.0, STOP_TIMEOUT)  # a trainer that is asked to end saves first
                # They hear of an end that is well; who came too late for that has to be asked.
                end(self.producers + self.stopping, 5.0 if code == 0 else 0.0, 5.0)

    def _ask(self, number: int, _: object) -> None:
        """Pass a first signal on to the trainer, which saves and stops; a second ends all."""
        for child in self.ranks:
            child.send(signal.SIGKILL if self.asked else number)
        self.asked = True

    def _start_ranks(self) -> None:
        # Ranks meet in memory that nobody else can open: a port obeys whoever connects to it.
        memory, size = os.memfd_create("draftcore-ranks"), str(len(self.ranks))
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, MEETING: f"/proc/self/fd/{memory}"}
        for rank, child in enumerate(self.ranks):
            if len(self.ranks) > 1:
                child.env |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                child.fds = (memory,)
            child.start()
            if self.asked:  # while there was nobody to pass it on to
                child.send(signal.SIGTERM)
        os.close(memory)

    def _watch_ranks(self) -> int | None:
        """Return the trainer's exit status once it ended for good; restart ranks that were killed."""
        code = verdict([child.code for child in self.ranks], self.asked)
        if code:
            # The others hear of it.
            end(self.ranks, 1.0 if code == ExitStatus.RANK_LOST else STOP_TIMEOUT)
        if code != ExitStatus.RANK_LOST:
            return code
        self._count(self.ranks[0], "the trainer was killed")
        self._start_ranks()
        return None

    def _watch_producers(self) -> None:
        if self.make_producer is not None and self.target_count is not None and self.producers:
            count = max(1, self.target_count())
            for child in self.producers[count:]:
                child.send(signal.SIGTERM)
            self.stopping += self.producers[count:]
            new = list(map(self.make_producer, range(len(self.producers), count)))
            self.producers = self.producers[:count] + new
            for child in new:
                child.start()
        for child in self.producers:
            code = child.code
            if not code or self.asked:  # at work, or it heard that the run is over
                continue
            if code == ExitStatus.REFUSED:  # it would be refused again
                raise UsageError(f"{child.name} cannot work for this run\n{child.tail()}")
            self._count(child, f"{child.name} ended with {code}")
            child.start()

    def _count(self, child: Child, what: str) -> None:
        child.restarts += 1
        if child.restarts > self.restarts:
            raise DraftcoreError(
                f"{what}, {child.restarts} times by now\n{child.tail()}\n".replace("\n\n", "\n")
                + "  mend the cause, or raise topology.restarts; the same command goes on"
            )


def end(children: Sequence[Child], seconds: float, asked: float = 1.0) -> None:
    """Wait so long until all have ended, ask for it and wait for `asked` seconds, then force it."""
    processes = [child.process for child in children if child.process is not None]
    for number, wait in ((None, seconds), (signal.SIGTERM, asked), (signal.SIGKILL, STOP_TIMEOUT)):
        if number is not None:
            for child in children:
                child.send(number)
        deadline = time.monotonic() + wait
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent(parent: int) -> None:
    """Let the kernel ask this process to stop when its parent has died; for a `preexec_fn`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(ExitStatus.FAILED)


def devices(ranks: int, producers: int, each: int = 1) -> dict[str, dict[str, str]]:
    """Assign GPUs, and print it: ranks first, one each; producers, which take `each`, get what is left.

    Returns environments by process. With no GPU, or a single process's worth, there is nothing to say.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        visible = ",".join(map(str, range(listed.stdout.count("GPU "))))
    gpus = [gpu for gpu in (visible or "").split(",") if gpu]
    if not gpus or not producers:
        return {}  # ranks take theirs by their number
    left = gpus[ranks:] if len(gpus) >= ranks + each else gpus[-each:]
    ends = range(each, max(len(left), each) + 1, each)
    spare = [",".join(left[end - each : end]) for end in ends]
    assigned = {f"rank {rank}": ",".join(gpus[:ranks]) for rank in range(ranks)}
    assigned |= {f"producer {number}": spare[number % len(spare)] for number in range(producers)}
    print("GPUs: " + ", ".join(f"{name} on {gpu}" for name, gpu in assigned.items()), flush=True)
    return {name: {"CUDA_VISIBLE_DEVICES": gpu} for name, gpu in assigned.items()}
