"""A draft sharded over ranks: FSDP2 around the whole of its loss.

What is odd: FSDP's root is a module of our own that runs `forward_loss`, not the draft's. So a loss
may read weights outside of the draft's `forward`, and may return records, of which FSDP would not
see the tensors; only a wrap unit's weights are for its own forward alone. Gradients are summed over
ranks, not averaged: the trainer divides once, by the step's denominator.

The collectives of a step follow from calls, not from data: for every batch, also one without a
supervised token, a loss must call the same wrap units and carry a gradient to the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext, StepOutput
from draftcore.errors import DraftcoreError
from draftcore.training.checkpoint import trained_tensors
from draftcore.training.distributed import Forward, Group, Loss

Output = tuple[Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]


class _Root(nn.Module):
    """The module whose forward is the loss."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: DraftBatch, context: StepContext) -> Output:
        output = self.loss(batch, context)
        return output.numerator, output.denominator, output.counts


class ShardedForward(Forward):
    """Shards a draft's parameters in place, the wrap units first, and calls it through FSDP."""

    every_rank = True  # as FSDP gathers weights in the forward

    def __init__(self, ranks: Group, draft: Draft, loss: Loss, *, evaluated: bool) -> None:
        super().__init__(ranks, draft, loss)
        self.copied = _copy(draft) if evaluated and ranks.rank == 0 else draft
        module = draft.module
        require_shardable(draft)
        before = dict(module.named_parameters(remove_duplicate=False))
        names = {parameter: name for name, parameter in before.items()}
        frozen = {before[name] for name in draft.frozen if name in before}
        self.root = _Root(module, loss)
        mesh = DeviceMesh.from_group(ranks.work, ranks.device("auto").type)
        for part in (*map(module.get_submodule, draft.wrap_units), self.root):
            sharded = fully_shard(part, mesh=mesh, ignored_params=frozen)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        now = dict(module.named_parameters(remove_duplicate=False))
        draft.parameter_groups = [
            {**group, "params": [now[names[p]] for p in group["params"]]}
            for group in draft.parameter_groups
        ]

    def __call__(self, batch: DraftBatch, context: StepContext, *, last: bool) -> StepOutput:
        root = cast(FSDPModule, self.root)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        output = StepOutput(*self.root(batch, context))
        if not output.numerator.requires_grad:
            raise DraftcoreError(
                "the loss of a batch does not depend on the draft's weights, so that ranks would wait "
                "for each other\n  forward_loss must carry a gradient, if of zeros, for any batch"
            )
        return output

    def add_up(self, parameters: Sequence[Tensor], scalars: Tensor) -> Tensor:
        """FSDP summed the gradients in the last backward; the scalars are left."""
        return self.ranks.sum(scalars)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def join_norms(self, norm: Tensor) -> Tensor:
        return self.ranks.sum(norm.double().square()).sqrt().to(norm.dtype)

    def place(self, value: Tensor, like: Tensor) -> Tensor:
        value = value.to(like.device)
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def whole(self) -> Draft:
        weights = trained_tensors(self.draft, self.ranks.rank)
        if self.ranks.rank == 0:
            self.copied.module.load_state_dict(weights, strict=False)
        return self.copied


def _copy(draft: Draft) -> Draft:
    """A copy of a draft with parameters of its own; buffers, which hold the target's, are shared."""
    return copy.deepcopy(draft, {id(buffer): buffer for buffer in draft.module.buffers()})


def require_shardable(draft: Draft) -> None:
    """Raise DraftcoreError for weights that FSDP cannot shard, before it does so in its own words."""
    units: dict[Tensor, set[str]] = {}
    for name, parameter in draft.module.named_parameters(remove_duplicate=False):
        around = [unit for unit in draft.wrap_units if name.startswith(f"{unit}.")]
        units.setdefault(parameter, set()).add(max(around, key=len, default=""))
        if parameter.ndim == 0:
            raise DraftcoreError(
                f"parameter {name} has no dimension and cannot be sharded over ranks\n"
                "  give it one, of length 1, in the algorithm's module"
            )
    if shared := [sorted(names) for names in units.values() if len(names) > 1]:
        raise DraftcoreError(
            f"a weight is shared by the wrap units {' and '.join(map(repr, shared[0]))}\n"
            "  name a unit that holds all of it in the draft's wrap_units, or none of them"
        )
