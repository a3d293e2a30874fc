"""The verbs as functions, for notebooks and programs: `draftcore.train("run.yaml", "train.lr=3e-4")`.

Each reads a run's YAML file, or takes a mapping of what it would say, applies overrides as the command
line writes them, does its work and returns what came of it. The command line calls these functions. What
is heavy is imported inside.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.errors import DraftcoreError, UsageError, raised
from draftcore.phases import ended, marks
from draftcore.plugins import catalog
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from draftcore.config import RunConfig
    from draftcore.options import Config
    from draftcore.run import Role, Run

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """How training ended, and each draft's newest checkpoint by its label, '' for a single draft.

    `reason` is `complete`, `stopped` (by a plugin) or `interrupted` (by a signal).
    """

    reason: str
    checkpoints: Mapping[str, Path]


def capture(
    config: Config, *overrides: str, registry: Registry | None = None, say: Say = print
) -> str:
    """Capture a run's features into its durable store; returns a line about what is there.

    Raises UsageError for a store that does not keep them, DraftcoreError where the disk is too small.
    """
    with open_run(config, overrides, registry) as run:
        from draftcore.run.capture import capture_all

        say(line := capture_all(run))
        run.report_runners(say)
        return line


def train(
    config: Config, *overrides: str, trainer: bool = False,
    progress: Callable[[int, dict[str, Any]], object] | None = None,
    registry: Registry | None = None, say: Say = print,
) -> Trained:  # fmt: skip
    """Train a run's drafts, each from its last checkpoint if any.

    `progress` is told of each step: its number and its metrics, with the `draft` where there are several.

    With `topology` its processes are started here and kept alive, unless this is to be the `trainer` of
    producers that are started elsewhere. Raises DraftcoreError where a draft failed or a process gave up.
    """
    marks.clear()
    ended("command")
    from draftcore.config import load_config
    from draftcore.files import STEPS

    settings = load_config(config, overrides)
    topology = settings.topology
    registry = registry or load_plugins()
    if topology.ranks + topology.producers > 1 and not trainer and "WORLD_SIZE" not in os.environ:
        if progress:
            raise UsageError("topology starts processes that tell nobody\n  leave progress out")
        from draftcore.plugins.binding import bind

        files = [part for p in registry.installed if p.loose for part in ("--plugin", p.dist)]
        bind_offer = functools.partial(bind, registry, extras=settings.plugins)
        reason = bind_offer("ranks", catalog.default("ranks")).hook.launch(
            config=settings,
            command=[sys.executable, "-m", "draftcore", *files],
            arguments=[] if isinstance(config, Mapping) else [str(config), *overrides],
            bind=bind_offer,
        )
    else:
        role: Role = "trainer" if trainer or topology.producers else "both"
        registry.watching = (telling(progress),) if progress else ()
        with open_run(settings, (), registry, role=role) as run:
            from draftcore.run.train import train as train_run

            reason = train_run(run, role, say)
            run.report_runners(say)
    places = {label: settings.run / label / "checkpoints" for label in settings.drafts or [""]}
    whole = {label: sorted(place.glob(f"{STEPS}/COMPLETE")) for label, place in places.items()}
    return Trained(reason, {label: found[-1].parent for label, found in whole.items() if found})


def telling(progress: Callable[[int, dict[str, Any]], object]) -> Plugin:
    """Return an observer that tells a function of each step; what that returns is not looked at."""

    @hookimpl
    def step_finished(step: int, metrics: Mapping[str, float], draft: str) -> None:
        progress(step, {**metrics, "draft": draft} if draft else {**metrics})

    hooks = SimpleNamespace(step_finished=step_finished)
    return Plugin("progress", "a function", "of this program", "", instance=hooks)


def export(
    config: Config, *overrides: str, draft: str | None = None, checkpoint: Path | None = None,
    out: Path | None = None, layout: str = "serving", force: bool = False,
    registry: Registry | None = None, say: Say = print,
) -> list[Path]:  # fmt: skip
    """Write each draft, or one, in a layout that servers load; returns the folders.

    `force` replaces an export that lies there; any other folder that holds something is refused. What
    measures drafts (`eval.name`) may write a card beside each, once it is there.
    """
    with open_run(config, overrides, registry) as run:
        from draftcore.drafts import write_export

        folders = []
        for draft_run in run.chosen(draft, checkpoint=checkpoint, out=out):
            folders.append(folder := out or draft_run.folder / "export")
            step = write_export(draft_run, checkpoint, folder, layout, force=force)
            say(f"{draft_run.prefix}exported step {step} to {folder}")
            evaluation = None
            with suppress(UsageError):  # where nothing is installed that measures drafts
                evaluation = run.evaluation()
            for line in getattr(evaluation, "card", lambda *given: ())(draft_run, folder):
                say(line)
        return folders


# ---------------------------------------------------------------- what they share


@contextmanager
def open_run(
    config: Config | RunConfig, overrides: Sequence[str] = (),
    registry: Registry | None = None, *, role: Role | None = None,
) -> Iterator[Run]:  # fmt: skip
    """Open a configured run; without a role it refuses to be started by torchrun."""
    from draftcore.config import RunConfig, load_config  # pydantic, then torch: only for what works

    settings = config if isinstance(config, RunConfig) else load_config(config, overrides)
    # Spinning OpenMP threads make a step 7 to 20 times slower where another process wants the
    # cores (docs/log.md, 2026-11-21); read once, when torch loads libgomp.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import ctypes

    with suppress(AttributeError, TypeError):  # where there is glibc
        # Else it gives tensors' memory back, and a tenth of a CPU's step goes for new pages.
        for option, size in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size)
    # torch's own place for compiled code is a name in /tmp that any user can make first.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{Path.home()}/.cache/draftcore/inductor")
    from draftcore.run import Run
    from draftcore.training.ranks import join

    registry = registry or load_plugins()
    with join(settings.train, registry, alone=role is None) as ranks:
        run = Run(settings, registry, ranks)
        with run.closing:
            try:
                yield run
            except SystemExit as error:
                if error.code:
                    raise
                raise DraftcoreError(f"{raised(error)} ended the run before its work") from error
            except Exception as error:
                run.explain_memory(error)
                raise
