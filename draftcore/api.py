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
from typing import TYPE_CHECKING, Any

from draftcore.errors import DraftcoreError, ExitStatus, raised
from draftcore.plugins.registry import Registry, load

if TYPE_CHECKING:
    from draftcore.config import RunConfig
    from draftcore.contracts.algorithm import Draft
    from draftcore.plugins.binding import Binding
    from draftcore.run import DraftRun, Role, Run
    from draftcore.training.checkpoint import Checkpoint

load_plugins = load
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
    config: str | Path, *overrides: str, trainer: bool = False,
    registry: Registry | None = None, say: Say = print,
) -> Trained:  # fmt: skip
    """Train a run's drafts, each from its last checkpoint if any.

    With `topology` its processes are started here and kept alive, unless this is to be the `trainer` of
    producers that are started elsewhere. Raises DraftcoreError where a draft failed or a process gave up.
    """
    from draftcore.config import load_config

    settings = load_config(Path(config), overrides)
    topology = settings.topology
    several = topology.producers > 0 or topology.ranks > 1
    if several and not trainer and "WORLD_SIZE" not in os.environ:
        reason = launch(settings, config, overrides, registry or load())
    else:
        role: Role = "trainer" if trainer or topology.producers else "both"
        with open_run(settings, (), registry, role=role) as run:
            from draftcore.run.train import train as train_run

            reason = train_run(run, role, say)
            show_runners(run, say)
    whole = {label: folder for label, folder in newest(settings).items() if folder}
    return Trained(reason, whole)


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


def bind(registry: Registry, kind: str, name: str, *more: Any, **given: Any) -> Binding:
    """Bind an offer, as `draftcore.plugins.binding.bind` does."""
    from draftcore.plugins.binding import bind

    return bind(registry, kind, name, *more, **given)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML and apply overrides, as `draftcore.config.load_config` does."""
    from draftcore.config import load_config  # pydantic: only for what works

    return load_config(path, overrides)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint, as `draftcore.training.checkpoint.open_checkpoint` does."""
    from draftcore.training.checkpoint import open_checkpoint

    return open_checkpoint(folder)


def open_draft(
    draft: DraftRun, checkpoint: Path | None, exported: Path | None
) -> tuple[Draft, int]:
    """Open a draft of a run and its step, as `draftcore.drafts.open_draft` does."""
    from draftcore.drafts import open_draft

    return open_draft(draft, checkpoint, exported)


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

    topology = settings.topology
    files = [part for file in registry.files for part in ("--plugin", file)]
    command = [sys.executable, "-m", "draftcore", *files]
    name, options = topology.launcher, topology.options
    binding = bind(registry, "launcher", name, options, settings.plugins)
    launcher = binding.hook.launcher(name=name, options=binding.options)
    (settings.run / SCALE).unlink(missing_ok=True)  # of an earlier start
    counts = topology.ranks, topology.producers, topology.restarts
    target = settings.target
    given = bind(registry, "target", target.name, target.options, (), target.plugin).options
    devices = getattr(given, "tensor_parallel", 1)
    arguments = [str(config), *overrides]
    code = launcher.run(Job(command, arguments, settings.run, *counts, settings.channel, devices))
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
    """Say what the runner of captures has to say of what it ran, if that was needed."""
    for line in run.prefill.report() if run.prefill is not None else ():
        say(f"{'runner.prefill':28}  {line}")
