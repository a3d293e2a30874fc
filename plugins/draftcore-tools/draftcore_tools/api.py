"""The verbs as functions: `verify`, `overfit` and `config`. What is heavy is imported inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import load_plugins, open_run
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.options import Config
    from draftcore_tools.configuration import Setting
    from draftcore_tools.overfit import Learned
    from draftcore_tools.verify import Verdict


def verify(
    export: str | Path, target: str | Path, *, server: str = "all",
    prompts: str | Path | None = None, run: str | Path | None = None, device: str = "auto",
    registry: Any = None,
) -> list[Verdict]:  # fmt: skip
    """Compare an export, as servers read it, with the draft; returns a verdict for each server.

    A verdict whose `divergence` is None says that the server would compute the draft. `prompts` are
    conversations in JSONL to ask from; `run` is the run, or checkpoint, that the export was made of.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from draftcore_tools.reference import open_reference
    from draftcore_tools.verify import servers_of, verify_export

    made_of = None if run is None else Path(run)
    asked = None if prompts is None else str(prompts)
    given = registry or load_plugins(), Path(export), made_of, str(target), device, asked
    with open_reference(*given) as reference:
        servers = servers_of(reference, server)
        return [verify_export(reference, Path(export), name) for name in servers]


def overfit(
    config: Config, *overrides: str, row: int = 0, steps: int = 4096, minutes: float = 10.0,
    lr: float | None = None, draft: str | None = None, registry: Any = None,
    say: Callable[[str], object] = print,
) -> dict[str, Learned]:  # fmt: skip
    """Teach each draft of a run, or one, a conversation; returns what each came to, by its label.

    Raises DraftcoreError where a draft does not learn it, with the stage and the usual causes.
    """
    rate = 0 < lr <= 100 if lr is not None else True
    if not (rate and 0 <= row <= 10**9 and 0 < steps <= 10**9 and 0 < minutes <= 10**6):
        raise UsageError(
            f"--row {row}, --steps {steps}, --minutes {minutes}, --lr {lr}: one is out of its range\n"
            "  rows count from 0; steps, minutes and lr are above 0, and lr at most 100"
        )
    registry = registry or load_plugins()
    with open_run(config, overrides, registry) as run:
        drafts = [(chosen.label, chosen.config) for chosen in run.chosen(draft)]
    from draftcore_tools.overfit import Limits, overfit_and_verify

    learned = dict[str, Learned]()
    for label, settings in drafts:
        if label:
            say(f"{label}:")
        limits = Limits(steps, minutes, lr)
        learned[label] = overfit_and_verify(settings, registry, row, limits, say)
    return learned


def config(config: Config, *overrides: str, registry: Any = None) -> Sequence[Setting]:
    """Return every key of a run, plugins' options too, with its value and who set it."""
    from draftcore_tools.configuration import resolved

    return resolved(config, overrides, registry or load_plugins())
