"""The verbs `eval` and `served` as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from draftcore import export, open_run
from draftcore.contracts.run import OpenDraft
from draftcore.errors import UsageError
from draftcore.files import EXPORT, read_sealed

if TYPE_CHECKING:
    from draftcore.options import Config
    from draftcore_eval.served import Served


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


def served(
    config: Config, *overrides: str, engine: str, draft: str | None = None,
    checkpoint: Path | None = None, exported: Path | None = None, requests: int = 1,
    dtype: str = "float32", options: Sequence[str] = (), speed: bool = False,
    registry: Any = None, say: Callable[[str], object] = print,
) -> list[Served]:  # fmt: skip
    """Decode the eval prompts by an engine, and by our own decoder: is each draft served as trained?

    `engine` is the name of one, or the URL of a server that runs; `options` are its own, as KEY=VALUE.
    The newest checkpoint is exported and served, or that which is named; or an export that is there, beside
    the checkpoint of its step. Of one that is served as trained the `speed` is measured as well, for its
    card. Raises DraftcoreError for an engine that does not answer all prompts.
    """
    from draftcore import open_draft
    from draftcore.options import apply_overrides
    from draftcore_eval import speed as speeds
    from draftcore_eval.causes import Variants
    from draftcore_eval.evaluation import Decoding
    from draftcore_eval.served import Asking, compare, decode_here, named

    if not 1 <= requests <= 1024:
        raise UsageError(f"--requests {requests} is out of range\n  it is 1 to 1024")
    apply_overrides(engine_options := dict[str, Any](), options)
    asking = Asking(*named(engine), requests, engine_options)
    given = (*overrides, f"target.dtype={dtype}", "eval.temperature=0")
    with open_run(config, given, registry) as run, TemporaryDirectory() as folder:
        evaluation, found = run.evaluation(), list[Any]()
        if not isinstance(evaluation, Decoding):
            raise UsageError("eval.name selects what does not decode\n  leave it out: decoding")
        for chosen in run.chosen(draft, checkpoint=checkpoint, export=exported):
            trained = checkpoint or checkpoint_of(exported, chosen)
            built, origin = open_draft(chosen, trained, exported if trained is None else None)
            prompts = evaluation.prompts_for(origin)
            fresh = exported or Path(folder)
            if "export" not in origin:  # the draft is read from its checkpoint
                fresh = Path(folder, chosen.label or "draft")
                place = {"draft": chosen.label or None, "checkpoint": trained, "out": fresh}
                export(config, *given, **place, registry=registry, say=lambda line: None)
            ids, categories = prompts.token_ids, getattr(prompts, "categories", ())
            decoded = decode_here(chosen, built, ids, evaluation.options)
            variants = Variants(chosen, fresh, ids, evaluation.options)
            found.append(compare(variants, *decoded, exported or fresh, categories, asking))
            for name, value in found[-1].lines():
                say(f"{name:28}  {value}")
            if speed and found[-1].as_trained:
                limit, count = evaluation.options.max_new_tokens, found[-1].num_drafts
                measured = speeds.measure(chosen, exported or fresh, count, ids, limit, asking)
                speeds.write(measured, origin.get("weights"), chosen.folder)
                places = dict.fromkeys(filter(None, (exported, chosen.folder / "export")))
                for line in card_lines(evaluation, chosen, places):
                    say(line)
                for name, value in speeds.lines(measured):
                    say(f"{name:28}  {value}")
        return found


def checkpoint_of(exported: Path | None, draft: OpenDraft) -> Path | None:
    """Return the checkpoint of an export's step, where the run still has it."""
    if exported is None or not (manifest := exported / EXPORT).is_file():
        return None
    try:
        step = int(read_sealed(manifest)["step"])
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{manifest} is not as it was written: {error}\n"
            "  name the checkpoint that was exported, with --checkpoint"
        ) from None
    folder = draft.folder / "checkpoints" / f"step-{step:08}"
    return folder if folder.is_dir() else None


def card_lines(
    evaluation: Any, draft: OpenDraft, exports: Iterable[Path],
    report: Mapping[str, Any] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Write the cards of those exports of a draft that are there; an evaluation may write none."""
    card = getattr(evaluation, "card", lambda *given: ())
    for folder in exports:
        if (folder / EXPORT).is_file():
            yield from card(draft, folder, report)
