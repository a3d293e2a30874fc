"""`draftcore eval`: find the draft and the prompts, decode, report."""

from __future__ import annotations

from pathlib import Path

from draftcore.data.dataset import read_prompts
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.evaluation.report import Report
from draftcore.run.drafts import find_checkpoint, load_checkpoint, load_export
from draftcore.run.parts import DraftRun


def evaluate_draft(draft: DraftRun, checkpoint: Path | None, exported: Path | None) -> Report:
    """Evaluate a draft's newest checkpoint, a named one, or an exported draft.

    Raises UsageError where there is nothing to evaluate, or nothing to evaluate it on.
    """
    run, config = draft.run, draft.config
    if checkpoint is not None and exported is not None:
        raise UsageError("--checkpoint and --export were both given\n  name one draft to evaluate")
    if config.data.eval is None:
        raise UsageError("data.eval is not set\n  set it to held-out conversations in JSONL")
    run.runners["decode"].check(run.target)
    if exported is not None:
        built, step = load_export(draft, exported), 0
    else:
        found = find_checkpoint(draft, checkpoint)
        built, step = load_checkpoint(draft, found), found.step
    prompts, _ = read_prompts(
        config.data.eval, run.target.tokenizer, config.eval.prompts, config.data.max_length
    )
    target = run.target.model
    built.module.to(target.device).eval()
    token_ids = [list(prompt.token_ids) for prompt in prompts]
    runner = draft.decoder(built)
    report = evaluate_prompts(runner, token_ids, config.eval)
    run.observers.evaluated(step=step, report=report.to_json(), draft=draft.label)
    return report
