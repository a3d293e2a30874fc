"""Start the processes of a run on the machines of a Ray cluster, and start again what is lost.

Each process of the run is a child of an actor of its own, a `Host`, which Ray places by what the role
asks for. The driver, the command that the user started, asks every host what its child prints and
whether it lives, shows it, and decides; nothing that matters is held in Ray. A machine that is lost
takes its hosts along: producers are started elsewhere, ranks all together from the last checkpoint, as
their collectives break together. When the driver is lost Ray ends the hosts, and their children are
told to stop, which for a rank means to save first.

Odd: a machine that is frozen or cut off looks like one that is lost, and may go on. Its hosts end their
children when nobody looks after them, and ranks start elsewhere once the run's folder is let go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from draftcore_disagg.launcher import Job, verdict
from draftcore_disagg.secret import secret
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from draftcore.contracts.run import LOCK
from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore.files import hold
from draftcore_ray.host import Host
from draftcore_ray.options import RayOptions, Request

# Ray kills what an actor started when the actor ends; a rank has to save first.
LET_SAVE = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
OWN = "RAY_", "LD_", "PYTHON"  # begin what is set of the environment for one machine
POLL_EVERY = 0.2  # seconds between two looks at the hosts
DOING = "still trains in the run's folder: waiting for its end, or its machine's"
START = 120.0  # seconds that a host may take to start, which imports Ray and draftcore
SHOW_WAITING_AFTER = 10.0  # seconds
GRACE = 30.0  # seconds in which a rank may save after it was asked to stop
KILLED = -int(signal.SIGKILL)  # exit status of a process whose machine, or host, is gone


@dataclass
class Process:
    """A process of the run on its host, and how often it was started again; `code` None: it runs."""

    name: str
    host: Any  # a Ray actor
    code: int | None = None
    restarts: int = 0
    pending: Any = None  # what it was asked last
    heard: float = 0.0  # when it last answered; 0: it waits for a machine with room
    begun: float = field(default_factory=time.monotonic)


class RayLauncher:
    """Runs a job on a Ray cluster; see `draftcore_disagg.launcher.Launcher`."""

    def __init__(self, options: RayOptions) -> None:
        self.options = options

    def run(self, job: Job) -> int:
        with contextlib.ExitStack() as stack:
            before = signal.getsignal(signal.SIGTERM)  # Ray sets it, and leaves it
            stack.callback(signal.signal, signal.SIGTERM, before)
            _connect(self.options, stack)
            return Driver(job, self.options, stack).run()


class Driver:
    """One run of a job: its processes, and what was asked of it by signals."""

    def __init__(self, job: Job, options: RayOptions, stack: contextlib.ExitStack) -> None:
        self.job, self.options = job, options
        self.ranks, self.producers, self.stopping = (list[Process]() for _ in range(3))
        self.group: Any = None
        self.restarts = 0  # of the ranks
        self.queue = ""  # where producers find it, HOST:PORT
        self.asked = list[int]()  # signals
        self.told = set[str]()
        self.secret = secret(job.folder)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # by nohup
            before = signal.signal(number, lambda number, _: self.asked.append(number))
            stack.callback(signal.signal, number, before)
        stack.callback(self.end)

    def run(self) -> int:
        """Run until the ranks have ended. Raises DraftcoreError where something cannot be kept alive."""
        try:
            self.require_folder_everywhere()
            self.start_ranks()
            return self.watch()
        except KeyboardInterrupt:  # by us, while no rank was there to be told
            return ExitStatus.INTERRUPTED

    def watch(self) -> int:
        passed = 0
        while True:
            self.poll(self.ranks + self.producers + self.stopping)
            if (code := self.judge_ranks()) is not None:
                return code
            self.keep_producers()
            for number in self.asked[passed:]:
                passed += 1
                if passed > 1:
                    return ExitStatus.INTERRUPTED
                for one in self.ranks:
                    one.host.send.remote(number)
            time.sleep(POLL_EVERY)

    def start_ranks(self) -> None:
        """Place the ranks together, as many as there is room for, and producers where some is left."""
        self.drop(
            self.producers + self.stopping
        )  # they hold room, and look for the queue where it was
        self.producers, self.stopping = [], []
        size = self.job.ranks
        while not self.place(size):
            if size == 1:
                there = ray.cluster_resources()  # type: ignore[no-untyped-call]
                raise UsageError(
                    f"no machine of the cluster has room for a rank, which asks for {self.options.rank}\n"
                    f"  the cluster has {there}\n"
                    "  lower topology.options.rank, or add a machine"
                )
            size = max(1, min(size - 1, sum(self.room().values())))
            self.tell(f"there may be room for {size} of {self.job.ranks} ranks")
        strategy = PlacementGroupSchedulingStrategy(self.group)
        hosts = [self.host(self.options.rank, scheduling_strategy=strategy) for _ in range(size)]
        self.ranks = [Process(f"rank {rank}", host) for rank, host in enumerate(hosts)]
        places = self.ask([host.address.remote(0 if at else 2) for at, host in enumerate(hosts)])
        if not places:
            for one in self.ranks:
                one.code = KILLED
            return
        self.require_folder(hosts)
        (address, (meeting, queue)), *_ = places
        here = len({place for place, _ in places}) == 1
        job, command = self.job, self.job.of("trainer")
        if job.producers and job.channel == "tcp":
            self.queue = f"{address}:{queue}"
        for rank, one in enumerate(self.ranks):
            env = {"DRAFTCORE_SECRET": self.secret}
            if size > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
                env |= {"MASTER_ADDR": address, "MASTER_PORT": str(meeting)}
                env["LOCAL_WORLD_SIZE"] = str(size if here else 1)
            self.begin(one, command, env)
            one.heard = time.monotonic()
        count = max(1, job.wanted()) if job.producers else 0
        self.producers = [self.start_producer(number) for number in range(count)]

    def place(self, size: int) -> bool:
        """Reserve room for so many ranks, near each other. Returns whether there is any in time."""
        bundle = self.options.rank.amounts() or {"CPU": 0.001}
        self.group = placement_group([bundle] * size, strategy="PACK")
        deadline = time.monotonic() + self.options.patience
        while not self.group.wait(1):
            if self.asked:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                remove_placement_group(self.group)
                self.group = None
                return False
        return True

    def room(self) -> dict[str, int]:
        """Return how many ranks each machine of the cluster has room for, if nothing else runs there."""
        asked, found = self.options.rank.amounts(), {}
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            there = [node["Resources"].get(name, 0) // amount for name, amount in asked.items()]
            if node["Alive"] and (most := int(min([self.job.ranks, *there]))):
                found[str(node["NodeID"])] = most
        return found

    def require_folder_everywhere(self) -> None:
        """Refuse a run's folder that is not seen by every machine that may be given rank 0."""
        here = [NodeAffinitySchedulingStrategy(node, soft=False) for node in self.room()]
        hosts = [self.host(Request(cpus=0), scheduling_strategy=one) for one in here]
        self.require_folder(hosts)
        for host in hosts:
            ray.kill(host)

    def require_folder(self, hosts: Sequence[Any]) -> None:
        mark = self.job.folder.resolve() / f".seen-{secrets.token_hex(8)}"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        try:
            if lacking := set(self.ask([host.lacks.remote(str(mark)) for host in hosts])) - {""}:
                raise UsageError(
                    f"the run's folder {self.job.folder} is not seen by {', '.join(sorted(lacking))}, "
                    "and any machine with room for a rank may be given rank 0, which writes there\n"
                    "  put it on a mount that all of them share, or choose machines that do by "
                    "topology.options.rank.resources"
                )
        finally:
            mark.unlink()

    def start_producer(self, number: int) -> Process:
        one = Process(f"producer {number}", self.host(self.options.producer))
        self.begin(one, self.job.of("producer"), {"DRAFTCORE_SECRET": self.secret})
        return one

    def host(self, request: Request, **placed: Any) -> Any:
        given = {
            "runtime_env": LET_SAVE,
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "resources": request.resources,
        }
        return Host.options(**given, **placed).remote(self.options.patience)  # type: ignore[attr-defined]

    def begin(self, one: Process, command: Sequence[str], env: dict[str, str]) -> None:
        queue = [f"channel=tcp://{self.queue}"] if self.queue else []
        ours = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        one.pending = one.host.start.remote([*command, *queue], ours, env, os.getcwd())

    def ask(self, refs: Sequence[Any]) -> list[Any]:
        """Get answers of hosts, none where one does not answer in time."""
        try:
            return list(ray.get(list(refs), timeout=max(self.options.patience, START)))
        except (RayError, GetTimeoutError) as error:
            self.tell(f"a machine of the cluster does not answer: {type(error).__name__}")
            return []

    def tell(self, text: str) -> None:
        """Say something once."""
        if text not in self.told:
            print(text, file=sys.stderr, flush=True)
        self.told.add(text)

    def poll(self, processes: Sequence[Process]) -> None:
        """Show what each process printed, and note which have ended or were lost."""
        waiting = [one for one in processes if one.code is None]
        for one in waiting:
            one.pending = one.pending or one.host.poll.remote()
        ready, _ = ray.wait([o.pending for o in waiting], num_returns=len(waiting), timeout=1.0)
        for one in waiting:
            if one.pending in ready:
                self.hear(one)
            silent = time.monotonic() - (one.heard or one.begun)
            if one.code is None and one.heard and silent > self.options.patience:
                ray.kill(one.host)  # as its machine is frozen, or cut off
                one.code = KILLED
            elif not one.heard and silent > SHOW_WAITING_AFTER:
                self.tell(f"{one.name} waits for a machine with room: {self.options.producer}")

    def hear(self, one: Process) -> None:
        lines: Sequence[str] = ()
        try:
            lines, one.code = ray.get(one.pending) or ((), None)
            one.heard = time.monotonic()
        except ActorUnavailableError:
            pass  # it is silent, so far
        except RayError:
            one.code = KILLED
        one.pending = None
        prefix = "" if one.name == "rank 0" else f"[{one.name}] "
        for line in lines:
            print(f"{prefix}{line}", flush=True)

    def judge_ranks(self) -> int | None:
        """Return the run's exit status once it ended for good; start ranks that were lost again."""
        found = self.verdict()
        if found and found != ExitStatus.RANK_LOST:  # unless another turns out to be lost
            self.wait_for(self.ranks, GRACE + self.options.patience * (not self.asked))
            found = self.verdict()
        if found != ExitStatus.RANK_LOST:
            return found
        self.restarts += 1
        self.count(self.restarts, "the trainer was killed, or lost its machine")
        self.drop(self.ranks)
        remove_placement_group(self.group)
        self.wait_for_folder()
        self.start_ranks()
        return None

    def verdict(self) -> int | None:
        # A rank that we did not ask to stop was asked by its host.
        codes = [
            ExitStatus.RANK_LOST if one.code == ExitStatus.INTERRUPTED else one.code
            for one in self.ranks
        ]
        return verdict(codes, bool(self.asked))

    def wait_for_folder(self) -> None:
        """Wait until no rank that was cut off trains on: its host ends it before `patience` is over."""
        while not self.asked:
            lock = self.job.folder / LOCK
            try:
                return os.close(hold(lock, DOING, f"if that will not come back, delete {lock}"))
            except DraftcoreError as error:
                self.tell(str(error))
            time.sleep(POLL_EVERY)
        raise KeyboardInterrupt

    def keep_producers(self) -> None:
        if self.producers:
            count = max(1, self.job.wanted())
            for one in self.producers[count:]:
                one.host.send.remote(int(signal.SIGTERM))
            self.stopping += self.producers[count:]
            there = range(len(self.producers), count)
            self.producers = self.producers[:count] + [self.start_producer(n) for n in there]
        for number, one in enumerate(self.producers):
            if not one.code or self.asked:  # at work, or it heard that the run is over
                continue
            if one.code == ExitStatus.REFUSED:  # it would be refused again
                raise UsageError(f"{one.name} cannot work for this run, for the reason above")
            self.count(one.restarts + 1, f"{one.name} ended with {one.code}")
            self.drop([one])
            self.producers[number] = self.start_producer(number)
            self.producers[number].restarts = one.restarts + 1

    def count(self, restarts: int, what: str) -> None:
        if restarts > self.job.restarts:
            raise DraftcoreError(
                f"{what}, {restarts} times by now\n"
                "  mend the cause, or raise topology.restarts; the same command goes on"
            )

    def wait_for(self, processes: Sequence[Process], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(one.code is None for one in processes) and time.monotonic() < deadline:
            self.poll(processes)
            time.sleep(POLL_EVERY)

    def drop(self, processes: Sequence[Process]) -> None:
        """End processes at once, and their hosts."""
        killed = [
            one.host.send.remote(int(signal.SIGKILL)) for one in processes if one.code is None
        ]
        ray.wait(killed, num_returns=len(killed), timeout=5.0) if killed else None
        for one in processes:
            with contextlib.suppress(RayError):
                ray.kill(one.host)

    def end(self) -> None:
        """Ask what is left to end, wait for it, and give back what the cluster lent."""
        for one in self.ranks:
            if one.code is None:
                one.host.send.remote(int(signal.SIGTERM))
        self.wait_for(self.ranks, GRACE)
        self.wait_for(self.producers, 5.0)  # they hear of the end
        self.drop(self.ranks + self.producers + self.stopping)
        if self.group is not None:
            remove_placement_group(self.group)


def _connect(options: RayOptions, stack: contextlib.ExitStack) -> None:
    """Join the cluster, or start one on this machine, until the stack closes."""
    address = options.address or os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        host, _, port = (address or "").rpartition(":")
        if port.isdecimal() and "/" not in host:  # ray would go on trying for minutes
            socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
        ray.init(
            address=address or "local",  # else it joins any that was started here
            namespace="draftcore",
            log_to_driver=False,
            configure_logging=False,
            **own,
        )
    except (OSError, RayError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"there is no Ray cluster at {address}: {error}\n"
            "  start one with `ray start --head`, or leave topology.options.address out; where that said "
            "that a token is asked for, set RAY_AUTH_MODE=token"
        ) from None
    stack.callback(ray.shutdown)
