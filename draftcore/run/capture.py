"""Offline capture: run every group of the dataset through the target into a durable store."""

from __future__ import annotations

from draftcore.contracts.channel import CaptureTask
from draftcore.errors import DraftcoreError, UsageError
from draftcore.run.parts import Run
from draftcore.training.progress import Progress
from draftcore.uris import format_size


def capture_all(run: Run) -> str:
    """Capture what the store lacks and complete its manifest; returns a line about the result.

    Raises UsageError for a store that does not outlive the process, DraftcoreError where the disk
    cannot hold the features.
    """
    if not run.durable:
        raise UsageError(
            f"store {run.store_uri!r} keeps features in this process only\n"
            "  set store=file:FOLDER to capture for a later training run"
        )
    run.runners["prefill"].check(run.target)
    run.check_store()
    producer, groups = run.producer, run.plan.groups
    held = run.store.lookup(run.samples.feature_ids)
    missing = [g for g in groups if not all(feature_id in held for feature_id in g.feature_ids)]
    require_space(run, sum(int(run.samples.lengths[row]) for g in missing for row in g.rows))
    run.write_manifest(complete=False)
    run.channel.offer(CaptureTask(0, group) for group in missing)
    with Progress(len(groups), len(groups) - len(missing), verb="capturing") as progress:
        done = len(groups) - len(missing)
        while producer.run_once() is not None:
            done += 1
            progress.update(done)
    if done < len(groups):
        raise DraftcoreError(
            f"{done} of {len(groups)} groups are captured, and channel {run.channel_uri!r} "
            "hands out no more\n  its limits leave no credit; set channel=memory and run again"
        )
    run.write_manifest(complete=True)
    stats = run.store.stats()
    new = sum(len(group.rows) for group in missing)
    return (
        f"captured {new} samples, {stats.samples - new} were there: "
        f"{stats.nbytes / 2**20:.0f} MiB in {run.store_uri}"
    )


def require_space(run: Run, tokens: int) -> None:
    """Refuse a capture that the store's medium cannot hold, before it begins."""
    need, free = tokens * run.token_bytes, run.store.stats().free_bytes
    if free is not None and need > free:
        raise DraftcoreError(
            f"the features need {format_size(need)}, {run.store_uri} has {format_size(free)} free\n"
            "  choose another store folder, lower data.limit, or train with store=memory, "
            "which captures on the way"
        )
