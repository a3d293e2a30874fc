"""Who starts, watches and restarts the processes of a run: `topology.launcher` chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from draftcore.errors import DraftcoreError, ExitStatus
from draftcore.files import STEPS, regular, write_atomic

QUEUE = "queue.json"  # in a run's folder: where the trainer's queue is reached, while it is
SCALE = "scale.json"  # in a run's folder: {"producers": N}, written while the run goes on
CONFIG = "config.json"  # in a run's folder: what was given as a mapping, for its processes
MEETING = "DRAFTCORE_RANKS"  # in a rank's environment: the file where the ranks of one machine meet


@dataclass(frozen=True)
class Job:
    """The processes of a run: so many `ranks` of the trainer, and `producers` that capture for them.

    `command` is draftcore's and `arguments` those of its verb; `of` returns a whole command. A process
    that a signal kills, or that is lost with its machine, is started again, all ranks together and a
    producer alone, up to `restarts` times each; one that says itself why it ended is not, unless it is a
    rank that ends with `RANK_LOST`, or a producer that failed, which may be tried anew but for `REFUSED`:
    that would be refused again. `folder` is the run's: rank 0 writes there. `channel` is the run's way from
    producers to the trainer; `tcp` stands for one that the launcher may choose. A producer takes so many
    `devices`, and starts by itself what it runs on them.
    """

    command: Sequence[str]
    arguments: Sequence[str]
    folder: Path
    ranks: int
    producers: int
    restarts: int
    channel: str = "tcp"
    devices: int = 1

    def of(self, role: Literal["trainer", "producer"]) -> list[str]:
        """Return the command of a rank or of a producer."""
        if role == "producer":
            return [*self.command, "produce", *self.arguments]
        trainer = ["--trainer"] * bool(self.producers)  # others capture for it
        return [*self.command, "train", *self.arguments, *trainer]

    def wanted(self) -> int:
        """Return how many producers there should be now: the file SCALE in the folder may say it."""
        try:
            return int(json.loads(regular(self.folder / SCALE).read_text())["producers"])
        except (OSError, ValueError, TypeError, KeyError):
            return self.producers


def verdict(codes: Sequence[int | None], asked: bool) -> int | None:
    """Return a run's exit status by those of its ranks, negative ones of signals; None: it goes on.

    `RANK_LOST` says that all ranks are to start again. `asked` is whether a signal came for the run,
    which then ends with `INTERRUPTED` unless its ranks had done their work.
    """
    ended = [code for code in codes if code]
    if not ended:
        return None if None in codes else ExitStatus.DONE
    if asked:
        return ExitStatus.INTERRUPTED
    lost = any(code < 0 or code == ExitStatus.RANK_LOST for code in ended)
    return ExitStatus.RANK_LOST if lost else max(ended)


class Launcher(Protocol):
    """Runs jobs. A rank finds its place in the environment, as `torchrun` sets it: RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a single rank needs none of these. Another run
    may be on the same machine, so the port is one that is free. Ranks and producers have the environment of
    who runs the job.
    """

    def run(self, job: Job) -> int:
        """Run a job until its ranks have ended, and end what is left; returns their exit status.

        Producers are started, or asked by SIGTERM to go, as `job.wanted()` changes.

        SIGINT, SIGTERM or SIGHUP is passed on to the ranks, which save and stop, a second one ends all;
        the status is then `INTERRUPTED`. Afterwards, also after an error, signals do what they did before.
        Raises DraftcoreError where a process cannot be kept alive, UsageError where what was asked for
        cannot be had or a producer was refused.
        """


def launch(config: Any, command: Sequence[str], arguments: Sequence[str], bind: Any) -> str:
    """Run the processes of a topology by its launcher; returns how training ended."""
    if not arguments:
        arguments = [str(file := config.run / CONFIG)]
        write_atomic(file, config.model_dump_json(exclude_unset=True))
    topology, target = config.topology, config.target
    bound = bind("launcher", topology.launcher, topology.options)
    launcher = bound.hook.launcher(name=topology.launcher, options=bound.options)
    (config.run / SCALE).unlink(missing_ok=True)  # of an earlier start
    given = bind("target", target.name, target.options, plugin=target.plugin).options
    devices = getattr(given, "tensor_parallel", 1)
    counts = topology.ranks, topology.producers, topology.restarts
    code = launcher.run(Job(command, arguments, config.run, *counts, config.channel, devices))
    if code == ExitStatus.INTERRUPTED:
        return "interrupted"
    if code:
        failed = DraftcoreError(f"the trainer ended with exit status {code}, for the reason above")
        failed.exit_status = code
        raise failed
    for folder in [config.run / label for label in config.drafts or [""]]:
        require_done(folder)
    return "complete"


def require_done(folder: Path) -> None:
    """Raise DraftcoreError where a draft's folder has no checkpoint of the last step or of its stop."""
    whole = max(folder.glob(f"checkpoints/{STEPS}/COMPLETE"), default=None)
    state = json.loads(whole.with_name("state.json").read_text()) if whole else {"step": 0}
    if state["step"] != state.get("total_steps") and not state.get("stopped"):
        raise DraftcoreError(
            f"the ranks ended without an error, and {folder} has no checkpoint of the last step\n"
            "  start the same command again: the run goes on from its last checkpoint"
        )
