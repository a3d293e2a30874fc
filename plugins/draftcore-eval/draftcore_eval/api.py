"""The verb `eval` as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import open_run
from draftcore.contracts.run import OpenDraft
from draftcore.files import EXPORT

if TYPE_CHECKING:
    from draftcore.options import Config


def evaluate(
    config: Config, *overrides: str, draft: str | None = None, checkpoint: Path | None = None,
    exported: Path | None = None, out: Path | None = None,
    registry: Any = None, say: Callable[[str], object] = print,
) -> list[Any]:  # fmt: skip
    """Measure each draft of a run, or one, by the evaluation that `eval.name` selects; returns reports.

    They are written, with plots, below the run's folder, or into `out`. The newest checkpoint is
    evaluated if neither a `checkpoint` nor an `exported` draft is named. Raises DraftcoreError where
    greedy output is not the target's own.
    """
    from draftcore import open_draft  # which imports torch

    with open_run(config, overrides, registry) as run:
        evaluation, reports = run.evaluation(), dict[str, Any]()
        for draft_run in run.chosen(draft, checkpoint=checkpoint, export=exported, out=out):
            built, origin = open_draft(draft_run, checkpoint, exported)
            report = reports[draft_run.label] = evaluation.evaluate(draft_run, built, origin)
            folder = out or draft_run.folder / "eval"
            # Said first, as decoding took minutes and the disk may be full.
            named = [("draft", draft_run.label)] if draft_run.label else []
            for name, value in [*named, *report.lines()]:
                say(f"{name:28}  {value}")
            report.write(folder)
            say(f"{'report and plot':28}  {folder}")
            places = dict.fromkeys(filter(None, (exported, draft_run.folder / "export")))
            for line in card_lines(evaluation, draft_run, places, report.to_json()):
                say(line)
        if len(reports) > 1:
            for line in ["", *evaluation.compare(reports, run.folder)]:
                say(line)
        run.report_runners(say)
        return list(reports.values())


def card_lines(
    evaluation: Any, draft: OpenDraft, exports: Iterable[Path], report: Mapping[str, Any]
) -> Iterator[str]:
    """Write the cards of those exports of a draft that are there; an evaluation may write none."""
    card = getattr(evaluation, "card", lambda *given: ())
    for folder in exports:
        if (folder / EXPORT).is_file():
            yield from card(draft, folder, report)
