"""An algorithm with all that sharding may stumble over, as a loose plugin.

Nested wrap units, a weight that the loss reads outside of the module's forward, a parameter of the
target's, one weight under two names, shapes that do not divide by the number of ranks, and, with
DROPOUT, random numbers from torch's own generator.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepOutput, TrainingDefaults
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.offers import Offer
from draftcore.contracts.target import TargetSpec

DROPOUT = 0.0


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(width, 7),
            nn.Linear(width, 7),
            nn.Linear(7, width),
        )
        self.gate.bias = self.up.bias  # one weight under two names

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return x + y


class Odd(nn.Module):
    def __init__(self, head_VH: Tensor) -> None:
        super().__init__()
        width = head_VH.shape[1]
        self.body = nn.Sequential(Layer(width), Layer(width))
        self.scale = nn.Parameter(torch.ones(1, width))  # one row for two ranks
        self.bias = nn.Parameter(torch.zeros(len(head_VH)))
        self.head = nn.Parameter(head_VH.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.body(x) * self.scale, DROPOUT)


@hookimpl
def describe() -> list[Offer]:
    return [Offer("algorithm", "odd")]


@hookimpl
def feature_request() -> FeatureRequest:
    return FeatureRequest((3,), False, "float32")


@hookimpl
def build_draft(target: TargetSpec) -> Draft:
    module = Odd(target.head())
    trained = [p for p in module.parameters() if p.requires_grad]
    return Draft(
        module,
        config={},
        defaults=TrainingDefaults(lr=3e-3, warmup_ratio=0.0, clip=0.5),
        parameter_groups=[
            {"params": trained[:2]},
            {"params": trained[2:], "weight_decay": 0.1},
        ],
        frozen=frozenset({"head"}),
        wrap_units=("body.1", "body"),
    )


@hookimpl
def collate(samples: Sequence[Sample]) -> DraftBatch:
    def pad(parts: Iterable[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    return DraftBatch(
        ids=tuple(sample.id for sample in samples),
        token_ids_BT=pad([sample.token_ids_T for sample in samples]),
        loss_mask_BT=pad([sample.loss_mask_T for sample in samples]),
        attention_mask_BT=pad([torch.ones_like(sample.loss_mask_T) for sample in samples]),
        features={"hidden.3": pad([sample.features["hidden.3"] for sample in samples])},
    )


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch) -> StepOutput:
    """Cross entropy of the next token; counts padding too, as a loss may."""
    module = cast(Odd, draft.module)
    hidden = module(batch.features["hidden.3"][:, :-1])
    logits = functional.linear(hidden, module.head, module.bias)
    mask = batch.loss_mask_BT[:, 1:].float()
    loss = functional.cross_entropy(
        logits.flatten(0, 1), batch.token_ids_BT[:, 1:].flatten(), reduction="none"
    )
    numerator = (loss * mask.flatten()).sum()
    rows = batch.attention_mask_BT.sum().float()
    right = ((logits.argmax(-1) == batch.token_ids_BT[:, 1:]) * mask).sum()
    return StepOutput(numerator, rows, {"accuracy": (right, mask.sum())})
