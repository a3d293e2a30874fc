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
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext, StepOutput
from draftcore.contracts.run import Ranks
from draftcore.errors import DraftcoreError, UsageError


class Sharded(nn.Module):
    """FSDP's root, whose forward is the loss; the draft's parameters are sharded in place."""

    def __init__(
        self, hook: Any, draft: Draft, options: Any, ranks: Ranks, evaluated: bool,
        trained_tensors: Callable[[Draft, int], Mapping[str, Tensor]],
    ) -> None:  # fmt: skip
        super().__init__()
        self.hook, self.options, self.ranks = hook, options, ranks
        self.trained_tensors = trained_tensors
        self.draft = self.copied = draft
        module = self.module = draft.module
        if evaluated and ranks.rank == 0:  # with parameters of its own; buffers are the target's
            shared: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
            self.copied = copy.deepcopy(draft, shared)
        require_shardable(draft)
        weights = dict(module.named_parameters(remove_duplicate=False))
        names = {parameter: name for name, parameter in weights.items()}
        frozen = {weights[name] for name in draft.frozen if name in weights}
        device = next(iter(names)).device
        mesh = DeviceMesh.from_group(ranks.device_group, device.type)
        for part in (*map(module.get_submodule, draft.wrap_units), self):
            sharded = fully_shard(part, mesh=mesh, ignored_params=frozen)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        shards = dict(module.named_parameters(remove_duplicate=False))
        draft.parameter_groups = [
            {**group, "params": [shards[names[p]] for p in group["params"]]}
            for group in draft.parameter_groups
        ]

    def forward(self, batch: DraftBatch, context: StepContext) -> tuple[Any, ...]:
        arguments = {"draft": self.draft, "batch": batch, "context": context}
        output = self.hook.forward_loss(**arguments, options=self.options)
        if len(output.terms) > 1:
            raise UsageError(
                f"the loss of this algorithm has {len(output.terms)} terms, which would each need the "
                "gradient of all weights\n  leave out train.shard, or choose options with a single ratio"
            )
        ((numerator, denominator, weight),) = output.terms
        return (numerator if weight == 1 else weight * numerator), denominator, output.counts

    def loss(self, batch: DraftBatch, context: StepContext, *, last: bool) -> StepOutput:
        """Return a batch's loss; `last` is true where its backward ends the step's gradient."""
        root = cast(FSDPModule, self)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        output = StepOutput(*self(batch, context))
        if not output.numerator.requires_grad:
            raise DraftcoreError(
                "the loss of a batch does not depend on the draft's weights, so that ranks would wait "
                "for each other\n  forward_loss must carry a gradient, if of zeros, for any batch"
            )
        return output

    def whole(self) -> Draft:
        """Return the draft with its present weights, for evaluation on rank 0; all ranks take part."""
        weights = self.trained_tensors(self.draft, self.ranks.rank)
        if self.ranks.rank == 0:
            self.copied.module.load_state_dict(weights, strict=False)
        return self.copied


def require_shardable(draft: Draft) -> None:
    """Raise DraftcoreError for weights that FSDP cannot shard: it unties shared ones without a word."""
    units: dict[Tensor, set[str]] = {}
    for name, parameter in draft.module.named_parameters(remove_duplicate=False):
        around = [unit for unit in draft.wrap_units if name.startswith(f"{unit}.")]
        units.setdefault(parameter, set()).add(max(around, key=len, default=""))
    if shared := [sorted(names) for names in units.values() if len(names) > 1]:
        raise DraftcoreError(
            f"a weight is shared by the wrap units {' and '.join(map(repr, shared[0]))}\n"
            "  name a unit that holds all of it in the draft's wrap_units, or none of them"
        )
