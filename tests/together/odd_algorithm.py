"""An algorithm with all that sharding may stumble over, as a loose plugin.

It learns from the target's likeliest tokens and from embeddings, beside a layer's output.
Nested wrap units, a weight that the loss reads outside of the module's forward, a parameter of the
target's, one weight under two names, shapes that do not divide by the number of ranks, and, with
DROPOUT, random numbers from torch's own generator.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepOutput, TrainingDefaults
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.offers import Offer
from draftcore.contracts.target import TargetSpec

DROPOUT = 0.0


class OddOptions(BaseModel):
    topk: int = 4


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
    return [Offer("algorithm", "odd", options=f"{__name__}:OddOptions")]


@hookimpl
def feature_request(options: OddOptions) -> FeatureRequest:
    return FeatureRequest((3,), False, "float32", options.topk, embeddings=True)


@hookimpl
def build_draft(target: TargetSpec) -> Draft:
    module = Odd(target.head())
    trained = [p for p in module.parameters() if p.requires_grad]
    return Draft(
        module,
        config={},
        defaults=TrainingDefaults(lr=3e-3, warmup_ratio=0.0, clip=0.5),
        parameter_groups=[{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}],
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
        features={
            name: pad([sample.features[name] for sample in samples])
            for name in ("hidden.3", "embeddings", "topk_logits", "topk_ids")
        },
    )


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch) -> StepOutput:
    """Cross entropy of the next token and of the likeliest; counts padding too, as a loss may."""
    module, given = cast(Odd, draft.module), batch.features
    hidden = module((given["hidden.3"] + given["embeddings"])[:, :-1])
    logits = functional.linear(hidden, module.head, module.bias)
    mask = batch.loss_mask_BT[:, 1:].float()
    loss = functional.cross_entropy(
        logits.flatten(0, 1), batch.token_ids_BT[:, 1:].flatten(), reduction="none"
    )
    likely_BTK = given["topk_logits"][:, :-1].softmax(-1)
    ours_BTK = logits.log_softmax(-1).gather(-1, given["topk_ids"][:, :-1].long())
    loss = loss - 0.5 * (likely_BTK * ours_BTK).sum(-1).flatten()
    numerator = (loss * mask.flatten()).sum()
    rows = batch.attention_mask_BT.sum().float()
    right = ((logits.argmax(-1) == batch.token_ids_BT[:, 1:]) * mask).sum()
    return StepOutput(numerator, rows, {"accuracy": (right, mask.sum())})
