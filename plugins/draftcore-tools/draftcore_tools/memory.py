"""What a step of a draft takes of a device, for any algorithm: it is taken with tensors that hold nothing.

They are torch's fake tensors: each operation says the shape of what it would return. Ids and masks are real,
as sizes follow from their values. Storages are counted as they come and go, forward and backward.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from draftcore.contracts.algorithm import DataSummary, Sample, SampleId, StepContext
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenDraft

aten = torch.ops.aten
VALUES: Any = {aten._local_scalar_dense.default: lambda x: 1}
VALUES[aten.equal.default] = lambda x, y: x is y
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
LARGE = 1 << 22  # elements of a tensor on whose values no size depends
ADAMW = 8  # bytes that it keeps of a parameter


class Storages(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that live; what is larger than `real`, or made of a fake one, is fake."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.sizes, self.real, self.peak = weakref.WeakKeyDictionary[Any, int](), 0, 0
        self.inside = False  # an operation that torch makes of others where tensors are fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fake, kwargs = any(isinstance(x, FakeTensor) for x in tensors), kwargs or {}
        if fake and func in VALUES:
            return VALUES[func](*args)
        if fake and func in INDEXED:  # masks, while it can be told how many places they name
            masks = [x is not None and x.dtype == torch.bool for x in args[1]]
            split = [
                x.nonzero().unbind(1) if m else [x] for x, m in zip(args[1], masks, strict=True)
            ]
            args = (args[0], [index for indices in split for index in indices], *args[2:])
        shapes = [x for x in args if isinstance(x, list) and all(type(n) is int for n in x)]
        sizes = (x.numel() << (4 * x.is_floating_point()) for x in tensors)  # sizes follow from ids
        large = max([1, *map(math.prod, shapes), *sizes]) > self.real
        operate = super().__torch_dispatch__ if fake or large else lambda f, _, a, k: f(*a, **k)
        inside, self.inside = self.inside, True
        try:
            made = operate(func, types, args, kwargs)
        finally:
            self.inside = inside
        if inside or func.is_view:  # what is viewed was counted, if as a real tensor
            return made
        for storage in (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)):
            if storage not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                self.peak = max(self.peak, sum(self.sizes.values()))
        return made


def zero_sample(request: FeatureRequest, width: int, mask_T: Tensor) -> Sample:
    """Return a sample of zeros with this loss mask."""
    forms, tokens_T = request.feature_specs(width).items(), torch.zeros_like(mask_T).long()
    features = {n: torch.zeros(len(mask_T), s, dtype=getattr(torch, d)) for n, (s, d) in forms}
    return Sample(SampleId("", 1), tokens_T, mask_T, features)


def step_memory(draft: OpenDraft, masks: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes that a draft takes between steps, and at most in one on rows of these loss masks.

    It is computed uncompiled. Raises whatever the algorithm does where tensors have no values.
    """
    run, hook, train = draft.run, draft.algorithm.hook, draft.config.train
    target, asked = copy.copy(run.target), {"options": draft.options}
    request = hook.feature_request(target=target, **asked)
    with Storages() as storages:
        table_VH = torch.empty(target.vocab_size, run.width, dtype=target.dtype)
        tied = getattr(target.config, "tie_word_embeddings", False)
        head_VH = table_VH if tied else torch.empty_like(table_VH)
        vars(target).update(embedding=lambda: table_VH, head=lambda: head_VH)
        summary = DataSummary("", len(masks), 1, 1, max(map(len, masks)), {})
        built = hook.build_draft(target=target, data=summary, **asked)
        state = ADAMW * sum(p.numel() for g in built.parameter_groups for p in g["params"])
        held, storages.real, storages.peak = sum(storages.sizes.values()), LARGE, 0
        samples = [zero_sample(request, run.width, mask) for mask in masks]
        for _ in range(min(2, train.accumulate or run.config.topology.ranks)):
            batch = hook.collate(samples=samples, **asked)
            batch = dataclasses.replace(batch, host_mask_BT=batch.loss_mask_BT)
            step = {"draft": built, "batch": batch, "context": StepContext(1, 2, 0)}
            with torch.autocast("cpu", torch.bfloat16, train.precision != "fp32"):
                terms = hook.forward_loss(**step, **asked).terms
            for term, (numerator, *_) in enumerate(terms, 1):
                numerator.backward(retain_graph=term < len(terms))
    return held + state, storages.peak + state
