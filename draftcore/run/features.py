"""What a run captures, of which rows, and the store: all that is decided of them is decided here.

`open_features` opens the store that the run names, and refuses one that its processes cannot use. With
`store: auto` features stay on the device of the process that captures them; where other processes train,
what brings their batches makes a store.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any, Literal, cast

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.offers import Bound
from draftcore.contracts.run import Samples
from draftcore.contracts.store import DurableStore, FeatureStore
from draftcore.data.plan import Plan
from draftcore.data.samples import StoredSamples
from draftcore.errors import UsageError
from draftcore.phases import ended
from draftcore.run import Role, Run, differences


@dataclass
class Features:
    """What a run captures, and where it is kept; `store` is None where features stay on the device.

    A durable store that the user names `keeps` them; what is read from any other is freed.
    """

    request: FeatureRequest
    provenance: str = ""
    binding: Bound | None = None
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
        problem = f"the drafts of this run ask for features of {' and '.join(sorted(dtypes))}"
        raise UsageError(f"{problem}\n  set capture.dtype to one type for all")
    for draft, request in zip(run.drafts, requests, strict=True):
        extras = (name for name in ("topk", "embeddings") if getattr(request, name))
        if lacking := [name for name in extras if name not in run.capture.capabilities]:
            others = ", ".join(run.registry.offering("capture", lacking[0]))
            raise UsageError(
                f"the algorithm {draft.choice.name!r} asks for the target's {lacking[0]}, and the "
                f"capture {run.config.capture.name!r} does not give them\n  set capture.name={others}"
            )
    return functools.reduce(FeatureRequest.union, requests)


def open_features(run: Run, role: Role | Literal["capture"]) -> Features:
    """Say what is captured, and open the store that the run names, if any.

    A durable store's wider request takes the place of what the drafts ask for. Raises UsageError for
    a store that this role cannot use, and for one that holds features which this run cannot use.
    """
    request, uri = requested_features(run), run.config.store
    features = Features(request)
    if uri != "auto":
        features.binding, features.store = run.open_store(uri)
        durable = "durable" in features.binding.capabilities
        features.keeps = durable and not getattr(features.store, "volatile", False)
    if features.keeps:
        features.manifest = cast(DurableStore, features.store).read_manifest()
    require_usable_store(run, role, features)
    ended("checks")
    features.provenance = run.provenance(request)  # it may read all weights
    ended("digest")
    if features.manifest is None:
        return features
    stored = FeatureRequest.from_json(features.manifest["request"])
    alike = stored.dtype == request.dtype and stored.topk >= request.topk
    if alike and {*request.names} <= {*stored.names}:  # it holds all that is asked for
        features.request, features.provenance = stored, run.provenance(stored)
    ours, theirs = features.provenance, features.manifest["provenance"]
    here, there = json.loads(ours), json.loads(theirs)
    # Batches of a complete store may be of another size.
    free = {"train.batch", "train.batch_tokens"} if features.complete else set()
    if any(here.get(name) != there.get(name) for name in {*here, *there} - free):
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
        problem = f"capture keeps features for a later training run, and store={store} does not"
        raise UsageError(f"{problem}\n  set store=file:FOLDER")
    if role == "both" and features.store is not None and not features.keeps:
        problem = f"this run captures for itself, and the store {store!r} keeps nothing"
        remedy = "leave store out, set store=file:FOLDER, or capture elsewhere: topology.producers"
        raise UsageError(f"{problem}\n  {remedy}")
    if role == "trainer" and features.binding and "shared" not in features.binding.capabilities:
        raise UsageError(
            f"this run has several processes, and the store {store!r} is reached by one only\n"
            "  set store=file:FOLDER, or another store that `draftcore list-plugins` shows as shared"
        )
    captures = role != "trainer" and not features.complete
    if captures and (lacks := run.capture.offer.lacks()):
        raise UsageError(lacks)
    run.target.require_layers(features.request, captures and "graphs" in run.capture.capabilities)
    on_each_rank = role == "both" and ranks > 1 and not features.complete
    if on_each_rank and not (run.target.devices == 1 and "per-rank" in run.capture.capabilities):
        raise UsageError(
            f"each of {ranks} ranks captures its own batches, and the capture {capture!r}, or the target, "
            "works in one process only\n  set topology.producers=1, or a capture that each rank may open"
        )


def open_samples(run: Run, features: Features) -> Samples:
    """Open the training samples: of the data file or, without one, of the store's manifest.

    Every rank has them; rank 0 renders first, and others find what it wrote where they see it.
    """
    manifest, ranks, store = features.manifest, run.ranks, run.config.store
    if run.data.train is None:
        if manifest is None or not features.complete:
            problem = f"data.train is not set and the store {store!r} holds no complete capture"
            remedy = "set data.train, or point store at a folder that `draftcore capture` finished"
            raise UsageError(f"{problem}\n  {remedy}")
        return StoredSamples(manifest)
    date = str(manifest["summary"].get("date", "")) if manifest is not None else ""
    with ranks.raise_on_all():
        samples = None if ranks.rank else run.data.samples("train", date)
    (first, *_) = ranks.all_gather(samples.summary if samples else None)
    assert first is not None  # rank 0 has rendered
    samples = samples or run.data.samples("train", first.date)
    with ranks.raise_on_all():
        if samples.summary.fingerprint != first.fingerprint:
            problem = f"rank {ranks.rank} has other data in {run.data.train} than rank 0"
            raise UsageError(f"{problem}\n  give every rank the same file")
    if manifest is not None and manifest["fingerprint"] != samples.summary.fingerprint:
        problem = f"the store {store!r} holds features of other data than {run.data.train}"
        remedy = "use another store folder, or delete this one to capture again"
        raise UsageError(f"{problem}\n  {remedy}")
    return samples


def make_plan(run: Run, samples: Samples, accumulate: int = 1) -> Plan:
    keys = {"batch", "batch_tokens", "seed", "epochs", "max_steps"}
    settings: dict[str, Any] = run.config.train.model_dump(include=keys)
    return Plan(samples.feature_ids, samples.lengths.tolist(), accumulate=accumulate, **settings)
