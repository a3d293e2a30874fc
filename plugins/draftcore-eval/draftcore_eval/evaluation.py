"""The evaluation `decoding`: what a draft saves, by decoding prompts with it for real."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import OpenDraft, OpenRun, Prompts
from draftcore.contracts.runner import Runner
from draftcore.errors import DraftcoreError, UsageError, plural
from draftcore_eval.card import versions, write_card
from draftcore_eval.decode import DecodingProgress, evaluate_prompts
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Report, comparison, plot
from draftcore_eval.runner import DecodeRunner
from draftcore_eval.serving import Size, forecast


class Decoding:
    """Decodes held-out prompts with a draft, and compares greedy output with the target's own."""

    def __init__(self, run: OpenRun, options: EvalOptions) -> None:
        self.run, self.options = run, options

    @functools.cached_property
    def runner(self) -> Runner:
        """What decodes, opened when something is to be decoded; raises UsageError where it cannot."""
        run, options = self.run, self.options
        longest = run.data.longest + options.max_new_tokens
        runner = run.open_runner(
            "decode", run.config.runner.decode,
            rows=options.batch, longest=longest, temperature=options.temperature,
        )  # fmt: skip
        runner.check(run.target)
        return runner

    def decoder(self, draft: OpenDraft, built: Draft) -> DecodeRunner:
        """Return what decodes with the draft, whose weights may be updated in place meanwhile."""
        model, drafter = self.run.target.load_model(), draft.drafter(built)
        runner: DecodeRunner = self.runner.decode(model, drafter, built.module)
        return runner

    def prompts(self, limit: int) -> Prompts:
        """Read the eval prompts. Raises UsageError where one and its answer are too long."""
        prompts, more = self.run.data.prompts(limit), self.options.max_new_tokens
        room = getattr(self.run.target.text_config, "max_position_embeddings", None)
        if room is not None and (need := max(map(len, prompts.token_ids)) + more) > room:
            raise UsageError(
                f"the longest prompt and eval.max_new_tokens={more} take {need} positions, and the target "
                f"has {room}\n  lower eval.max_new_tokens or data.max_length"
            )
        return prompts

    def prompts_for(self, origin: Mapping[str, Any]) -> Prompts:
        """Read the eval prompts, all that `eval.prompts` lets, for a draft that comes from `origin`.

        Raises UsageError without such prompts, and where they are written with another chat template
        than the rows that the draft was trained on.
        """
        prompts = self.prompts(self.options.prompts or 0)
        then, now = origin.get("chat_template"), prompts.about.get("chat_template")
        if then and now and then != now:
            raise UsageError(
                "the eval prompts are written with another chat template, or other options of it, than "
                "the rows that the draft was trained on\n"
                "  set data.chat_template and data.template_options as in the run that trained it"
            )
        return prompts

    def evaluate(self, draft: OpenDraft, built: Draft, origin: Mapping[str, Any]) -> Report:
        """Decode the eval prompts with a draft, for real.

        Raises as `prompts_for` does, and DraftcoreError where nothing was drafted.
        """
        run, options = self.run, self.options
        prompts = self.prompts_for(origin)
        ids, text = prompts.token_ids, None
        with suppress(UsageError):  # a target may know token ids alone
            text = run.target.load_tokenizer().decode
        device = run.target.load_model().device
        built.module.to(device).eval()
        with DecodingProgress(len(ids), options.batch) as progress:
            decoder, show = self.decoder(draft, built), progress.show_batch
            report = evaluate_prompts(decoder, ids, options, show, text)
        if not report.rounds:
            raise DraftcoreError(
                f"the target ends its answer to each of {plural(len(ids), 'prompt')} with the first "
                "token: nothing was drafted, so nothing was measured\n  evaluate on other prompts"
            )
        about = {
            "draft": draft.label,
            "algorithm": draft.algorithm.offer.name,
            "step": origin["step"],
            "origin": dict(origin),
            "target": run.target.path,
            "target_fingerprint": run.target.fingerprint(),
            **prompts.about,
            "eval": options.model_dump(mode="json"),
            "device": str(device),
            "dtype": str(run.target.dtype).removeprefix("torch."),
            "plugins": run.manifest([draft]),
            "versions": versions("draftcore", "torch", "transformers"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        report = dataclasses.replace(
            report, about=about, served=self.forecast(report, draft, built)
        )
        more = draft.more_metrics(built, report.to_json())
        report = dataclasses.replace(report, more=more)
        run.observers.evaluated(step=origin["step"], report=report.to_json(), draft=draft.label)
        return report

    def forecast(self, report: Report, draft: OpenDraft, built: Draft) -> dict[str, Any]:
        """Return what the draft would gain on a server, at the context of these prompts and answers."""
        tokens = sum(row["prompt_tokens"] + row["tokens"] / 2 for row in report.rows)
        target = self.run.target
        return forecast(
            report.acceptance_by_position,
            report.num_drafts,
            Size.of_target(target.load_model()),
            Size.of_draft(built.module, target),
            parallel="parallel" in draft.algorithm.capabilities,
            context=tokens / len(report.rows),
            options=self.options,
        )

    def card(
        self, draft: OpenDraft, folder: Path, report: Mapping[str, Any] | None = None
    ) -> Sequence[str]:
        """Write what an export is, what was measured of it and how to serve it into its README.md.

        Without a report that is the newest one of the same weights, if any. Returns lines to show.
        """
        return write_card(draft, folder, report)

    def compare(self, reports: Mapping[str, Report], folder: Path) -> Sequence[str]:
        """Return a table of several drafts by label, and plot them in a folder."""
        plot(reports, file := folder / "comparison.png")
        return [*comparison(reports), f"{'plot of all':28}  {file}"]

    def in_training(self, draft: OpenDraft) -> Callable[[Draft], dict[str, float]]:
        """Return what decodes `train.eval_prompts` with a draft in training, for its acceptance length.

        What decodes is kept from one evaluation to the next: weights are updated in place, so graphs
        that were captured once serve all of them.
        """
        if self.run.target.devices > 1:
            raise UsageError(
                "a target that several devices share cannot decode: set train.eval_prompts=0"
            )
        self.runner  # noqa: B018  what it refuses is refused now
        prompts = functools.cache(lambda: self.prompts(draft.config.train.eval_prompts))
        kept: list[tuple[Draft, DecodeRunner]] = []

        def measure(built: Draft) -> dict[str, float]:
            if not kept or kept[0][0] is not built:
                kept[:] = [(built, self.decoder(draft, built))]
            decoded = evaluate_prompts(kept[0][1], prompts().token_ids, self.options)
            return {"acceptance_length": decoded.acceptance_length}

        return measure
