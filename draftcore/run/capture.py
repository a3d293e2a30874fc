"""The program `capture`: fill a durable store with a run's features, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import cast

from draftcore.contracts.capture import BadRows
from draftcore.contracts.run import PlannedBatch, Samples
from draftcore.contracts.store import DurableStore
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, plural
from draftcore.features.checks import CheckedCapture
from draftcore.progress import Progress
from draftcore.run import Run
from draftcore.run.features import Features, make_plan, open_features, open_samples
from draftcore.uris import format_size


def capture_all(run: Run) -> str:
    """Capture what a durable store lacks and complete its manifest; returns a line about the result.

    Raises UsageError for a store that does not outlive the process, DraftcoreError where the disk cannot
    hold the features.
    """
    features = open_features(run, "capture")
    store, samples = cast(DurableStore, features.store), open_samples(run, features)
    skipped = Skipped({}, rows=len(samples.feature_ids), share=run.config.data.max_skipped)
    new = fill_store(run, features, samples, make_plan(run, samples), skipped)
    there, size = (stats := store.stats()).samples - new, stats.nbytes / 2**20
    return f"captured {plural(new, 'sample')}, {there} were there: {size:.0f} MiB in {store.uri}"


def fill_store(
    run: Run, features: Features, samples: Samples, plan: Plan, skipped: Skipped,
    uses: Iterable[PlannedBatch] | None = None,
) -> int:  # fmt: skip
    """Capture what a durable store lacks of the batches that are used, all if not given.

    Ranks share the batches. Returns the number of samples that this rank captured. Raises
    DraftcoreError where the disk cannot hold the features.
    """
    ranks, store, ids = run.ranks, cast(DurableStore, features.store), samples.feature_ids
    needed = range(len(plan.batches)) if uses is None else sorted({use.index for use in uses})

    def begin() -> list[int]:
        """Write a first manifest; return the batches of which the store lacks a row."""
        present = {*store.lookup(ids), *(ids[row] for row in skipped)}
        lacking = [i for i in needed if not present.issuperset(ids[r] for r in plan.batches[i])]
        tokens = sum(int(plan.lengths[row]) for i in lacking for row in plan.batches[i])
        need, free = tokens * features.request.token_bytes(run.width), store.stats().free_bytes
        if free is not None and need > free:
            sizes = f"need {format_size(need)}, {store.uri} has {format_size(free)} free"
            remedy = "choose another folder, lower data.limit, or set store=auto, which keeps none"
            raise DraftcoreError(f"the features {sizes}\n  {remedy}")
        write_manifest(run, features, samples, skipped, complete=False)
        return lacking

    share, before = ranks.on_rank0(begin)[ranks.rank :: ranks.size], set(skipped)
    with ranks.raise_on_all(), ExitStack() as stack:
        total, done = len(needed), len(needed) - len(share)
        progress = stack.enter_context(Progress(total, done, "capturing", shown=not ranks.rank))
        if share:
            capture = run.open_capture(features.request, samples)
            stack.enter_context(closing(capture))
            for number, index in enumerate(share, done + 1):
                capture_batch(index, plan.batches[index], capture, features, samples, skipped)
                progress.show(number)
    new = {row: why for row, why in skipped.items() if row not in before}
    for theirs in filter(None, ranks.all_gather(new)):
        skipped.add(theirs)
    if len(needed) == len(plan.batches):
        ranks.on_rank0(lambda: write_manifest(run, features, samples, skipped, complete=True))
    return sum(len(plan.batches[index]) for index in share) - len(new)


def capture_batch(
    index: int, rows: Sequence[int], capture: CheckedCapture, features: Features,
    samples: Samples, skipped: Skipped,
) -> None:  # fmt: skip
    """Capture a batch into the store; bad rows are skipped, and the others captured without them."""
    store = cast(DurableStore, features.store)
    while (batch := batch_of(index, rows, samples, skipped)).rows:
        masks = [samples.loss_mask(row).tolist() for row in batch.rows]
        try:
            capture.begin(batch, masks, store, features.provenance)()
            return
        except BadRows as error:
            skipped.add({batch.rows[at]: why for at, why in error.reasons.items()})


def write_manifest(
    run: Run, features: Features, samples: Samples, skipped: Skipped, *, complete: bool
) -> None:
    """Describe a store's features in it, so that another host can train from the store alone."""
    cast(DurableStore, features.store).write_manifest(
        {
            "complete": complete,
            "fingerprint": samples.summary.fingerprint,
            "request": asdict(features.request),
            "provenance": features.provenance,
            "feature_ids": list(samples.feature_ids),
            "lengths": samples.lengths.tolist(),
            "summary": samples.summary.to_json(),
            "skipped": sorted(skipped.items()),
            "target": {"path": run.target.path, "revision": run.target.revision},
            "plugins": run.manifest(run.drafts, run.capture),
        }
    )
