"""The program `eval`: decode the eval prompts with a draft, for real."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import UTC, datetime

from importlib_metadata import version

from draftcore.contracts.algorithm import Draft
from draftcore.data.sources import named, open_source
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.evaluation.report import Report, more_metrics
from draftcore.run import DraftRun
from draftcore.training.progress import Progress


def evaluate_draft(draft: DraftRun, built: Draft, step: int) -> Report:
    """Decode the eval prompts with a draft, for real. Raises UsageError without such prompts."""
    run, config = draft.run, draft.config
    run.runners["decode"].check(run.target)
    prompts, read = run.prompts(config.eval.prompts)
    built.module.to(run.target.load_model().device).eval()
    with Progress(len(prompts), verb="decoding", every=config.eval.batch) as progress:
        report = evaluate_prompts(draft.decoder(built), prompts, config.eval, progress.show)
    data = config.data.eval or ()
    about = {
        "draft": draft.label,
        "algorithm": draft.choice.name,
        "step": step,
        "target": run.target.path,
        "target_fingerprint": run.target.fingerprint(),
        "data": named(data),
        "data_digest": open_source(data, run.find).key(),
        "left_out": dict(Counter(bad.reason for bad in read.skipped)),
        "eval": config.eval.model_dump(mode="json"),
        "device": str(run.target.load_model().device),
        "dtype": str(run.target.dtype).removeprefix("torch."),
        "plugins": run.manifest([draft]),
        "versions": {name: version(name) for name in ("draftcore", "torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    report = dataclasses.replace(report, about=about)
    more = more_metrics(draft.algorithm.hook, built, report.to_json(), draft.options)
    report = dataclasses.replace(report, more=more)
    run.observers.evaluated(step=step, report=report.to_json(), draft=draft.label)
    return report
