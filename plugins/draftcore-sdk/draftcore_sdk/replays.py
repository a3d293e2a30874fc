"""Compare what a graph runner replays with its own work, called eagerly on the same padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.runners import GraphRunner
from draftcore_graphs.states import tensors
from torch import Tensor
from torch.utils._pytree import tree_map

from draftcore.contracts.runner import Outputs, ShapeKey


def written(runner: GraphRunner) -> list[Tensor]:
    """What a runner's work reads and may write: its static buffers, in decoding also the caches."""
    found = list(runner.buffers.storage.values())
    if isinstance(runner, DecodeGraphRunner):
        found += tensors((runner.cache, runner.state))
    return found


@torch.inference_mode()
def largest_gap(runner: GraphRunner, key: ShapeKey) -> float:
    """The largest difference of one replay of a captured bucket from its work; 0 for equal bits.

    Outputs count and all that was written. The runner is left as the work left it.
    """
    places = written(runner)
    before = _copies(places)
    with runner.backend.replay_session():
        found = _leaves(runner.backend.replay(key)) + _copies(places)
    for place, value in zip(places, before, strict=True):
        place.copy_(value)
    right = _leaves(runner.work(key)(runner.buffers.view(key))) + places
    return max(map(_gap, found, right), default=0.0)


def _gap(found: Tensor, right: Tensor) -> float:
    if found.dtype != right.dtype or found.shape != right.shape:
        return float("inf")
    if torch.equal(found, right):
        return 0.0
    return float((found.double() - right.double()).abs().nan_to_num(float("inf")).max())


def _leaves(outputs: Outputs) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf.clone()) if isinstance(leaf, Tensor) else None, outputs)
    return found


def _copies(places: Sequence[Tensor]) -> list[Tensor]:
    return [place.clone() for place in places]
