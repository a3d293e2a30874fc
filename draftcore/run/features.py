"""What a run captures, of which rows, and the store: all that is decided of them is decided here.

`open_features` opens the store that the run names, and refuses one that its processes cannot use. With
`store: auto` features stay on the device of the process that captures them; where other processes train,
`open_auto_store` makes a store in shared memory.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from draftcore.contracts.capture import BadRows, Capture, FeatureRequest
from draftcore.contracts.store import DurableStore, FeatureStore
from draftcore.data.dataset import Dataset
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import Samples, StoredSamples, batch_of
from draftcore.data.sources import named
from draftcore.errors import UsageError
from draftcore.features.checks import CheckedCapture
from draftcore.features.provenance import differences
from draftcore.plugins.binding import Binding
from draftcore.run import Role, Run
from draftcore.uris import format_size

MEMORY = Path("/dev/shm")
LEAST_STORE = 32 << 20  # bytes; half of the shared memory that Docker gives a container
TEXT_BYTES, HEAD_BYTES = 9, 4096  # beside the features: of a token, of a row


@dataclass
class Features:
    """What a run captures, and where it is kept; `store` is None where features stay on the device.

    A durable store that the user names `keeps` them; what is read from any other is freed.
    """

    request: FeatureRequest
    provenance: str
    binding: Binding | None = None
    store: FeatureStore | None = None
    keeps: bool = False
    manifest: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.manifest is not None and bool(self.manifest["complete"])


def requested_features(run: Run) -> FeatureRequest:
    """Return all that any draft of a run asks for. Raises UsageError for what no capture gives."""
    requests = [draft.request() for draft in run.drafts]
    if len(dtypes := {request.dtype for request in requests}) > 1:
        raise UsageError(
            f"the drafts of this run ask for features of {' and '.join(sorted(dtypes))}\n"
            "  set capture.dtype to one type for all"
        )
    for draft, request in zip(run.drafts, requests, strict=True):
        extras = (name for name in ("topk", "embeddings") if getattr(request, name))
        if lacking := [name for name in extras if name not in run.capture.capabilities]:
            others = ", ".join(run.registry.offering("capture", lacking[0]))
            raise UsageError(
                f"the algorithm {draft.choice.name!r} asks for the target's {lacking[0]}, and the "
                f"capture {run.config.capture.name!r} does not give them\n  set capture.name={others}"
            )
    return functools.reduce(FeatureRequest.union, requests)


def open_features(run: Run, role: Role | Literal["capture"] = "both") -> Features:
    """Say what is captured, and open the store that the run names, if any.

    A durable store's wider request takes the place of what the drafts ask for. Raises UsageError for
    a store that this role cannot use, and for one that holds features which this run cannot use.
    """
    request, uri = requested_features(run), run.config.store
    features = Features(request, run.provenance(request))
    if uri != "auto":
        features.binding, features.store = open_store(run, uri)
        durable = "durable" in features.binding.capabilities
        features.keeps = durable and not getattr(features.store, "volatile", False)
    if features.keeps:
        features.manifest = cast(DurableStore, features.store).read_manifest()
    require_usable_store(run, role, features)
    if features.manifest is None:
        return features
    stored = read_request(features.manifest["request"])
    if stored.serves(request):
        features.request, features.provenance = stored, run.provenance(stored)
    ours, theirs = features.provenance, features.manifest["provenance"]
    wanted, there = json.loads(ours), json.loads(theirs)
    if features.complete:  # whose batches may be of another size
        wanted["train.batch"] = there.get("train.batch")
    if wanted != there:
        raise UsageError(
            f"the store {uri!r} holds features that this run cannot use\n"
            f"{differences(ours, theirs, 'in the store')}\n"
            "  use another store folder, or delete this one to capture again"
        )
    features.provenance = theirs
    return features


def require_usable_store(run: Run, role: str, features: Features) -> None:
    """Refuse a store or a capture that the processes of this run cannot share."""
    store, capture, ranks = run.config.store, run.config.capture.name, run.ranks.size
    if role == "capture" and not features.keeps:
        raise UsageError(
            f"capture keeps features for a later training run, and store={store} does not\n"
            "  set store=file:FOLDER"
        )
    if role == "both" and features.store is not None and not features.keeps:
        raise UsageError(
            f"this run captures for itself, and the store {store!r} keeps nothing\n"
            "  leave store out, set store=file:FOLDER, or capture elsewhere: topology.producers"
        )
    if role == "trainer" and features.binding and "shared" not in features.binding.capabilities:
        raise UsageError(
            f"this run has several processes, and the store {store!r} is reached by one only\n"
            "  set store=file:FOLDER, or another store that `draftcore list-plugins` shows as shared"
        )
    on_each_rank = role == "both" and ranks > 1 and not features.complete
    shared = run.config.target.tensor_parallel > 1
    if on_each_rank and (shared or "per-rank" not in run.capture.capabilities):
        place = "processes of its own" if shared else "one process only"
        raise UsageError(
            f"each of {ranks} ranks captures its own batches, and the capture {capture!r} works in "
            f"{place}\n  set topology.producers=1, or a capture that each rank may open"
        )


def open_auto_store(
    run: Run, run_id: str, features: Features, plan: Plan, batches: int
) -> Features:
    """Open the store of `auto` between processes: in shared memory, with room for so many batches.

    It is the same at every start of a run, as producers that outlive a trainer hold on to it. Raises
    UsageError where there is too little memory.
    """
    offers = run.registry.offered("store").items()
    fast = [name for name, capabilities in offers if {"memory-speed", "shared"} <= capabilities]
    if len(fast) > 1:
        raise UsageError(
            f"several stores are in shared memory: {', '.join(fast)}\n  set store to one of them"
        )
    token_bytes = features.request.token_bytes(run.width) + TEXT_BYTES
    need = plan.largest(batches) * token_bytes + batches * plan.batch * HEAD_BYTES
    room = max(LEAST_STORE, 2 * need)  # as what is free in a ring may lie scattered
    folder = MEMORY / f"draftcore-{run_id}"
    uri = f"file:{folder}?volatile=yes&max_bytes={room}"
    if fast:
        uri = f"{fast[0]}:{run_id}?run={run_id}&max_bytes={room}"
    elif not folder.exists() and (free := shutil.disk_usage(MEMORY).free) < room:
        raise UsageError(
            f"features on their way need {format_size(room)} of shared memory, and {MEMORY} has "
            f"{format_size(free)} free\n"
            "  make it larger, lower train.batch or train.prefetch, or set store=file:FOLDER"
        )
    binding, store = open_store(run, uri)
    return replace(features, binding=binding, store=store)


def read_request(data: Mapping[str, Any]) -> FeatureRequest:
    return FeatureRequest(**{**data, "layers": tuple(data["layers"])})


def open_store(run: Run, uri: str) -> tuple[Binding, FeatureStore]:
    """Open a store: a durable one on each rank, any other on rank 0, whose URI the others join."""
    name, ranks = uri.partition(":")[0], run.ranks
    binding, store = run.bind("store", name), None
    open_at = functools.partial(binding.hook.feature_store, name=name)
    with ranks.raise_on_all():
        if not ranks.rank or "durable" in binding.capabilities:
            store = open_at(uri=uri)
    (first_uri, *_) = ranks.all_gather(store.uri if store else "")
    store = store or open_at(uri=first_uri)
    run.closing.callback(store.close)
    return binding, store


def open_capture(run: Run, request: FeatureRequest, samples: Samples | None = None) -> Capture:
    """Open the run's capture, which checks itself, also on a row with images if `samples` have one.

    Raises UsageError where it cannot work.
    """
    run.runners["prefill"].check(run.target)  # also where the backend does not ask
    capture = run.capture.hook.capture(
        name=run.capture.offer.name, target=run.target, request=request, options=run.capture.options
    )
    checked = CheckedCapture(capture, str(run.capture.plugin), request.feature_specs(run.width))
    trial = []
    if isinstance(samples, Dataset) and samples.all_images:
        row = PlannedBatch(0, 0, 0, 0, 0, (min(samples.all_images),))
        trial.append(batch_of(row, samples, samples.feature_ids, {}))
    with ExitStack() as failed:
        failed.callback(checked.close)
        with suppress(BadRows):  # a target whose images it cannot capture is refused now
            list(checked.features(trial))
        failed.pop_all()
    return checked


def open_samples(run: Run, features: Features) -> Samples:
    """Open the training samples: of the data file or, without one, of the store's manifest.

    Every rank has them; rank 0 renders first, and others find what it wrote where they see it.
    """
    config, manifest, ranks = run.config, features.manifest, run.ranks
    source, limit = config.data.train, config.data.limit
    if source is None:
        if manifest is None or not features.complete:
            raise UsageError(
                f"data.train is not set and the store {config.store!r} holds no complete capture\n"
                "  set data.train, or point store at a folder that `draftcore capture` finished"
            )
        return StoredSamples(manifest)
    date = str(manifest["summary"].get("date", "")) if manifest is not None else ""
    with ranks.raise_on_all():
        dataset = None if ranks.rank else run.dataset(source, "train", limit, date)
    (first, *_) = ranks.all_gather(dataset.summary if dataset else None)
    assert first is not None  # rank 0 has rendered
    dataset = dataset or run.dataset(source, "train", limit, first.date)
    with ranks.raise_on_all():
        if dataset.fingerprint != first.fingerprint:
            raise UsageError(
                f"rank {ranks.rank} has other data in {named(source)} than rank 0\n"
                "  give every rank the same file"
            )
    if manifest is not None and manifest["fingerprint"] != dataset.fingerprint:
        raise UsageError(
            f"the store {config.store!r} holds features of other data than {named(source)}\n"
            "  use another store folder, or delete this one to capture again"
        )
    return dataset


def make_plan(run: Run, samples: Samples, accumulate: int = 1) -> Plan:
    train = run.config.train
    return Plan(
        samples.feature_ids, samples.lengths.tolist(), batch=train.batch, accumulate=accumulate,
        seed=train.seed, epochs=train.epochs, max_steps=train.max_steps,
    )  # fmt: skip
