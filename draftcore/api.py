"""The verbs as functions, for notebooks and programs: `draftcore.train("run.yaml", "train.lr=3e-4")`.

Each reads a run's YAML file, applies overrides as the command line writes them, does its work and
returns what came of it. The command line calls these functions. What is heavy is imported inside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore.errors import DraftcoreError, ExitStatus, raised
from draftcore.plugins.registry import Registry, load

if TYPE_CHECKING:
    from draftcore.config import RunConfig
    from draftcore.evaluation.report import Report
    from draftcore.run import Role, Run

Say = Callable[[str], None]
WHOLE = "checkpoints/step-*/COMPLETE"


@dataclass(frozen=True)
class Trained:
    """How training ended, and each draft's newest checkpoint by its label, '' for a single draft.

    `reason` is `complete`, `stopped` (by a plugin) or `interrupted` (by a signal).
    """

    reason: str
    checkpoints: Mapping[str, Path]


def capture(
    config: str | Path, *overrides: str, registry: Registry | None = None, say: Say = print
) -> str:
    """Capture a run's features into its durable store; returns a line about what is there.

    Raises UsageError for a store that does not keep them, DraftcoreError where the disk is too small.
    """
    with open_run(config, overrides, registry) as run:
        from draftcore.run.capture import capture_all

        line = capture_all(run)
        say(line)
        show_runners(run, say)
        return line


def train(
    config: str | Path, *overrides: str, role: Role | None = None,
    registry: Registry | None = None, say: Say = print,
) -> Trained:  # fmt: skip
    """Train a run's drafts, each from its last checkpoint if any.

    With `topology` its processes are started here and kept alive, unless a `role` is given: then this
    process is the one. Raises DraftcoreError where a draft failed or a process gave up.
    """
    from draftcore.config import load_config

    settings = load_config(Path(config), overrides)
    producers = settings.topology.producers > 0
    several = producers or settings.topology.ranks > 1
    if role is None and several and "WORLD_SIZE" not in os.environ:
        reason = launch(settings, config, overrides, registry or load())
    else:
        role = role or ("trainer" if producers else "both")
        with open_run(settings, (), registry, role=role) as run:
            if role == "producer":
                from draftcore.run.produce import produce_features

                print(f"waiting for the trainer of {settings.run}", file=sys.stderr)
                reason, line = produce_features(run)
                say(line)
            else:
                from draftcore.run.train import train as train_run

                reason = train_run(run, role, say)
                show_runners(run, say)
    whole = {label: folder for label, folder in newest(settings).items() if folder}
    return Trained(reason, whole)


def evaluate(
    config: str | Path, *overrides: str, draft: str | None = None, checkpoint: Path | None = None,
    exported: Path | None = None, out: Path | None = None,
    registry: Registry | None = None, say: Say = print,
) -> list[Report]:  # fmt: skip
    """Decode the eval prompts for real with each draft, or one; returns their reports.

    They are written, with plots, below the run's folder, or into `out`. The newest checkpoint is
    evaluated if neither a `checkpoint` nor an `exported` draft is named. Raises DraftcoreError where
    greedy output is not the target's own.
    """
    with open_run(config, overrides, registry) as run:
        from draftcore.drafts import open_draft
        from draftcore.evaluation.report import comparison, plot
        from draftcore.run.evaluate import evaluate_draft

        reports: dict[str, Report] = {}
        for draft_run in run.chosen(draft, checkpoint=checkpoint, export=exported, out=out):
            built, step = open_draft(draft_run, checkpoint, exported)
            report = reports[draft_run.label] = evaluate_draft(draft_run, built, step)
            folder = out or draft_run.folder / "eval"
            # Said first, as decoding took minutes and the disk may be full.
            for name, value in [("draft", draft_run.label)] * bool(
                draft_run.label
            ) + report.lines():
                show_row(name, value, say)
            report.write(folder)
            show_row("report and plot", str(folder), say)
        if len(reports) > 1:
            for line in ["", *comparison(reports)]:
                say(line)
            plot(reports, file := run.folder / "comparison.png")
            show_row("plot of all", str(file), say)
        show_runners(run, say)
        return list(reports.values())


def export(
    config: str | Path, *overrides: str, draft: str | None = None, checkpoint: Path | None = None,
    out: Path | None = None, layout: str = "serving", force: bool = False,
    registry: Registry | None = None, say: Say = print,
) -> list[Path]:  # fmt: skip
    """Write each draft, or one, in a layout that servers load; returns the folders.

    `force` replaces an export that lies there; any other folder that holds something is refused.
    """
    with open_run(config, overrides, registry) as run:
        from draftcore.drafts import export, find_checkpoint

        folders = []
        for draft_run in run.chosen(draft, checkpoint=checkpoint, out=out):
            folder, last = (
                out or draft_run.folder / "export",
                find_checkpoint(draft_run, checkpoint),
            )
            folders.append(export(draft_run, last, folder, layout, force=force))
            say(f"{draft_run.prefix}exported step {last.step} to {folder}")
        return folders


# ---------------------------------------------------------------- what they share


@contextmanager
def open_run(
    config: str | Path | RunConfig, overrides: Sequence[str] = (),
    registry: Registry | None = None, *, role: Role | None = None,
) -> Iterator[Run]:  # fmt: skip
    """Open a configured run; without a role it refuses to be started by torchrun."""
    from draftcore.config import load_config  # pydantic, then torch: only for what works

    settings = load_config(Path(config), overrides) if isinstance(config, str | Path) else config
    # Spinning OpenMP threads make a step 7 to 20 times slower where another process wants the
    # cores (docs/performance.md, 2026-11-21); read once, when torch loads libgomp.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch's own place for compiled code is a name in /tmp that any user can make first.
    compiled = Path.home() / ".cache/draftcore/inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    from draftcore.run import Run
    from draftcore.training.ranks import join

    with join(settings.train, alone=role in (None, "producer")) as ranks:
        run = Run(settings, registry or load(), ranks)
        with run.closing:
            try:
                yield run
            except SystemExit as error:
                if error.code:
                    raise
                raise DraftcoreError(f"{raised(error)} ended the run before its work") from error


def launch(
    settings: RunConfig, config: str | Path, overrides: Sequence[str], registry: Registry
) -> str:
    """Run the processes of a topology; returns how training ended."""
    from draftcore.contracts.launcher import SCALE, Job
    from draftcore.plugins.binding import bind

    topology = settings.topology
    files = [part for file in registry.files for part in ("--plugin", file)]
    command = [sys.executable, "-m", "draftcore", *files, "train", str(config), *overrides]
    name, options = topology.launcher, topology.options
    binding = bind(registry, "launcher", name, options, settings.plugins)
    launcher = binding.hook.launcher(name=name, options=binding.options)
    (settings.run / SCALE).unlink(missing_ok=True)  # of an earlier start
    counts = topology.ranks, topology.producers, topology.restarts
    devices = settings.target.tensor_parallel
    code = launcher.run(Job(command, settings.run, *counts, settings.channel, devices))
    if code == ExitStatus.INTERRUPTED:
        return "interrupted"
    if code:
        failed = DraftcoreError(f"the trainer ended with exit status {code}, for the reason above")
        failed.exit_status = code
        raise failed
    require_done(settings)
    return "complete"


def newest(settings: RunConfig) -> dict[str, Path | None]:
    """Return the newest whole checkpoint of each draft by its label, '' for a single one."""
    return {
        label: max((m.parent for m in (settings.run / label).glob(WHOLE)), default=None)
        for label in settings.drafts or [""]
    }


def require_done(settings: RunConfig) -> None:
    """Raise DraftcoreError where a draft was not stopped and lacks its last checkpoint."""
    for label, folder in newest(settings).items():
        try:
            state = json.loads((folder / "state.json").read_text()) if folder else {}
            done = state["step"] == state["total_steps"] or state.get("stopped")
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            done = False
        if not done:
            raise DraftcoreError(
                f"the ranks ended without an error, and {settings.run / label} has no checkpoint of "
                "the last step\n"
                "  start the same command again: the run goes on from its last checkpoint"
            )


def show_runners(run: Run, say: Say) -> None:
    """Say what the runners have to say of what they ran, those that were needed."""
    for phase, runner in run.runners.items():
        for line in runner.report():
            show_row(f"runner.{phase}", line, say)


def show_row(name: str, value: str, say: Say) -> None:
    say(f"{name:28}  {value}")
