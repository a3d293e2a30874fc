"""The DFlash2 draft: DFlash's backbone, convolutions that mix a block's rows, and a selector.

The backbone drafts a block in one forward. A short convolution around attention and around the MLP of every
layer lets each row read the rows just before it; the context, from which keys and values come too, does not
pass it. The selector then chooses among the best tokens of each row, given the token chosen before.

Shape letters: M kept blocks, S rows of a block, R rows with weight, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from draftcore_dflash.attention import Tiles
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.loss import metrics
from draftcore_dflash.model import Angles, Attend, Backbone, DecoderLayer
from draftcore_nn.batches import host_mask
from torch import Tensor

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_dflash2.config import DFlash2Config
from draftcore_dflash2.convolution import ShortConvolution
from draftcore_dflash2.loss import selected_cross_entropy, selector_weight
from draftcore_dflash2.selector import CandidateSelector

if TYPE_CHECKING:
    from draftcore_dflash2.options import DFlash2Options


class ConvolvedLayer(DecoderLayer):
    """A layer of the backbone with a convolution around attention, and one around the MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        assert isinstance(config, DFlash2Config)
        sizes = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
        self.attention_conv = ShortConvolution(*sizes)
        self.mlp_conv = ShortConvolution(*sizes)

    def run(self, hidden_H: Tensor, angles: Angles, attend: Attend) -> Tensor:
        hidden_H = hidden_H + self.attention_conv(
            self.input_layernorm(hidden_H), lambda x_H: self.self_attn(x_H, angles, attend)
        )
        x_H = self.post_attention_layernorm(hidden_H)
        return hidden_H + self.mlp_conv(x_H, self.mlp)  # type: ignore[no-any-return]


class DFlash2Draft(Backbone):
    """The draft with its loss."""

    layer = ConvolvedLayer
    config: DFlash2Config
    options: DFlash2Options

    def __init__(
        self, config: DFlash2Config, options: DFlash2Options, embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(config, options, embedding_VH, head_VH)
        sizes = (config.vocab_size, config.hidden_size, config.selector_rank)
        self.candidate_selector = CandidateSelector(*sizes)

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        blocks = draw_blocks(batch, self.options.num_anchors, context.seed)
        return self.loss_of(batch, blocks, selector_weight(self.options, context))

    def loss_of(self, batch: DraftBatch, blocks: Blocks, alpha: float) -> StepOutput:
        """Return the loss of given blocks, which lie on the CPU, see `forward`."""
        device = batch.token_ids_BT.device
        targets = Targets.of(host_mask(batch), blocks, self.config.block_size)
        tiles = self.tiles(batch, blocks)
        # Made there, as a copy would wait for the step before; of a single number in fp64 on the CPU a
        # compiler would make a constant, in a second compilation.
        weight = torch.full((1,), alpha, dtype=torch.float64, device=device)
        blocks, targets = blocks.to(device), targets.to(device)
        output: StepOutput = self(batch, blocks, targets, tiles, weight)
        return output

    def forward(
        self, batch: DraftBatch, blocks: Blocks, targets: Targets, tiles: Mapping[str, Tiles],
        alpha: Tensor,
    ) -> StepOutput:  # fmt: skip
        """Return sum(w (unary + alpha * selector)) / sum(w); `train.compile` compiles this.

        Rows weigh as in DFlash. Metrics: both losses, `accuracy` and `acceptance_length` of the
        selector told the data's tokens, the same of the best tokens alone (`unary_`), and of a
        selector that never errs (`oracle_`: is the label among the candidates).
        """
        options, selector = self.options, self.candidate_selector
        hidden_MSH = self.block_hidden(batch, blocks, tiles)
        exact, valid_MS = torch.promote_types(hidden_MSH.dtype, torch.float32), targets.valid_MS
        weight_MS = targets.weights(options.loss_decay_gamma, exact)
        sample_M1, before_MS = blocks.sample_M[:, None], (targets.index_MS - 1).clamp_min(0)
        hidden_RH = targets.take(hidden_MSH)
        if options.distils:
            last_BTH = batch.features["last_hidden"]
            labels = targets.take(last_BTH[sample_M1, before_MS]).to(hidden_RH.dtype)
        else:
            labels = targets.labels(batch.token_ids_BT, blocks)
        query_RE = selector.query(
            hidden_RH.detach() if options.stop_gradient else hidden_RH,
            targets.take(batch.token_ids_BT[sample_M1, before_MS]),
        )
        losses = selected_cross_entropy(
            hidden_RH, query_RE, selector.successor_codebook, self.head, labels,
            targets.take(weight_MS) * (targets.row_R < valid_MS.numel()), alpha.to(exact),
            self.target_logits, options, self.config.selector_top_k,
        )  # fmt: skip
        denominator, right_R = weight_MS.sum(), losses.chosen_R == losses.label_R
        counts = {
            "unary_loss": (targets.weigh(losses.unary_R, weight_MS), denominator),
            "selector_loss": (targets.weigh(losses.selector_R, weight_MS), denominator),
        }
        for prefix, hits_R in (
            ("", right_R & losses.among_R),
            ("unary_", losses.best_R == losses.label_R),
            ("oracle_", losses.among_R),
        ):
            counts |= metrics(targets.lay(hits_R), valid_MS, exact, prefix)
        return StepOutput(losses.objective, denominator, counts)
