"""The DSpark draft: DFlash's backbone, whose rows predict the next token, with two heads and their loss.

Row k of the block at anchor a predicts token a+k+1, so the anchor's own row is of use. Its logits are
W h plus the Markov head's correction by token a+k. With p the target's distribution and q the draft's,

    L = sum w (ce CE(token) + l1 ||p - q||_1 + confidence BCE(c, sum min(p, q))) / sum w,

w = exp(-k/gamma) up to the first row of a block whose token is not to be learned, 0 from there on
(arXiv 2607.05147, section 3.3). What the confidence c learns is held constant in the gradient.

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, R rows with weight, H hidden, E rank
of the correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from draftcore_dflash.attention import Tiles
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks, rows_with_loss
from draftcore_dflash.loss import metrics
from draftcore_dflash.model import Backbone
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import full_precision
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_dspark.config import DSparkConfig
from draftcore_dspark.heads import ConfidenceHead, MarkovHead

if TYPE_CHECKING:
    from draftcore_dspark.options import DSparkOptions


class DSparkDraft(Backbone):
    """The draft with its loss."""

    config: DSparkConfig
    options: DSparkOptions

    def __init__(
        self, config: DSparkConfig, options: DSparkOptions, embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(config, options, embedding_VH, head_VH)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    @property
    def mixture(self) -> Mapping[str, float]:
        """The shares of the losses of q; the L1 distance is twice the total variation."""
        return {"ce": self.options.ce_weight, "tv": 2 * self.options.l1_weight}

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.loss_of(batch, draw_blocks(batch, self.options.num_anchors, context.seed))

    def loss_of(self, batch: DraftBatch, blocks: Blocks) -> StepOutput:
        """Return the loss of given blocks, which lie on the CPU, see `forward`."""
        device, size = batch.token_ids_BT.device, self.config.block_size
        targets = unbroken(Targets.of(host_mask(batch), blocks, size, shifted=True)).to(device)
        output: StepOutput = self(batch, blocks.to(device), targets, self.tiles(batch, blocks))
        return output

    def forward(
        self, batch: DraftBatch, blocks: Blocks, targets: Targets, tiles: Mapping[str, Tiles]
    ) -> StepOutput:
        """Return one ratio over the sum of weights; `train.compile` compiles this.

        Metrics: `ce_loss`, `tv_loss` (half the L1 distance) and, of the confidence head,
        `confidence_loss` and `confidence_error` by the rows' weights, `acceptance_rate` (the mean
        overlap of p and q), `accuracy` and `acceptance_length`.
        """
        options, hidden_MSH = self.options, self.block_hidden(batch, blocks, tiles)
        exact = torch.promote_types(hidden_MSH.dtype, torch.float32)
        weight_MS = targets.weights(options.loss_decay_gamma, exact)
        denominator, label_R = weight_MS.sum(), self.labels(batch, blocks, targets)
        before_MS = batch.token_ids_BT[blocks.sample_M[:, None], targets.index_MS - 1]
        embedded_MSE = self.markov_head.embed(before_MS, hidden_MSH.dtype)
        factor_RE = targets.take(self.markov_head(embedded_MSE, hidden_MSH))
        hidden_RH, w2_VE = targets.take(hidden_MSH), self.markov_head.markov_w2.weight
        found = self.compare(
            batch, blocks, targets, hidden_RH, label_R, weight_MS, self.mixture, (factor_RE, w2_VE)
        )
        numerator = found.objective
        by_row = {f"{name}_loss": loss_R for name, loss_R in found.losses.items()}
        if self.confidence_head is not None:
            logit_R = self.confidence_head(hidden_RH, targets.take(embedded_MSE))
            with full_precision(logit_R.device):
                loss_R = functional.binary_cross_entropy_with_logits(
                    logit_R, found.overlap_R, reduction="none"
                )
                judged = targets.weigh(loss_R, weight_MS)
                numerator = numerator + options.confidence_weight * judged
            by_row["confidence_loss"] = loss_R.detach()
            by_row["confidence_error"] = (logit_R.detach().sigmoid() - found.overlap_R).abs()
        counts = {
            name: (targets.weigh(x_R, weight_MS), denominator) for name, x_R in by_row.items()
        }
        counts["acceptance_rate"] = targets.mean(found.overlap_R)
        counts |= metrics(targets.lay(found.best_R == label_R), targets.valid_MS, exact)
        return StepOutput(numerator, denominator, counts)

    def labels(self, batch: DraftBatch, blocks: Blocks, targets: Targets) -> Tensor:
        """Return the token that each row learns, [R]."""
        return targets.labels(batch.token_ids_BT, blocks)


def unbroken(targets: Targets) -> Targets:
    """Drop the rows of a block from the first on that has nothing to learn."""
    valid_MS = targets.valid_MS.cumprod(1).bool()
    return replace(targets, valid_MS=valid_MS, row_R=rows_with_loss(valid_MS))
