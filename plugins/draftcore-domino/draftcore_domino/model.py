"""The Domino draft: DFlash's backbone, and a causal head that corrects its logits.

The backbone drafts a block in one forward, so its rows know nothing of each other's choice. The
head makes up for that: a GRU reads the tokens of the block one after another, and a low-rank map of
[block state, GRU state] is added to the base logits. The GRU computes in its weights' own
precision, also under autocast: its states compound rounding over the block.

Shape letters: M kept blocks, S rows of a block, R rows with weight, H hidden, G GRU state, E rank of
the correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from draftcore_dflash.attention import Tiles
from draftcore_dflash.blocks import Blocks, Targets, draw_blocks
from draftcore_dflash.loss import metrics
from draftcore_dflash.model import Backbone
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import full_precision
from torch import Tensor, nn

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_domino.config import DominoConfig
from draftcore_domino.head import corrected_cross_entropy
from draftcore_domino.loss import base_share

if TYPE_CHECKING:
    from draftcore_domino.options import DominoOptions


class DominoDraft(Backbone):
    """The draft with its loss. `embed_proj.2` maps to the vocabulary; no part has a bias."""

    config: DominoConfig
    options: DominoOptions

    def __init__(
        self, config: DominoConfig, options: DominoOptions, embedding_VH: Tensor,
        head_VH: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(config, options, embedding_VH, head_VH)
        width, states = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = nn.GRU(width, states, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + states, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        share = base_share(self.options, context)
        blocks = draw_blocks(batch, self.options.num_anchors, context.seed)
        return self.loss_of(batch, blocks, share)

    def loss_of(self, batch: DraftBatch, blocks: Blocks, base_share: float) -> StepOutput:
        """Return the loss of given blocks, which lie on the CPU, see `forward`.

        The GRU runs here, as torch compiles none.
        """
        config, device = self.config, batch.token_ids_BT.device
        given = (host_mask(batch), blocks, config.block_size)
        targets = Targets.of(*given, shifted=config.shift_label).to(device)
        tiles, blocks = self.tiles(batch, blocks), blocks.to(device)
        states_MSG = self.prefix_states(batch, blocks)
        # Made there: a copy would wait for the step before.
        share = torch.full((), base_share, dtype=torch.float64, device=device)
        output: StepOutput = self(batch, blocks, targets, tiles, states_MSG, share)
        return output

    def forward(
        self, batch: DraftBatch, blocks: Blocks, targets: Targets, tiles: Mapping[str, Tiles],
        states_MSG: Tensor, share: Tensor,
    ) -> StepOutput:  # fmt: skip
        """Return sum(w ((1 - share) CE_final + share CE_base)) / sum(w); `train.compile` compiles this.

        Rows weigh as in DFlash. Metrics: `final_loss`, `accuracy`, `acceptance_length`, the same
        with `base_`, and `lambda`.
        """
        config, hidden_MSH = self.config, self.block_hidden(batch, blocks, tiles)
        exact, valid_MS = torch.promote_types(hidden_MSH.dtype, torch.float32), targets.valid_MS
        weight_MS, share = targets.weights(self.options.loss_decay_gamma, exact), share.to(exact)
        label_R = targets.labels(batch.token_ids_BT, blocks)
        hidden_RH = targets.take(hidden_MSH)
        low_RE = self.low_rank(hidden_RH, targets.take(states_MSG))
        corrected_R = targets.row_R % config.block_size >= config.first_corrected_row
        kept_R = targets.row_R < valid_MS.numel()
        losses = corrected_cross_entropy(
            hidden_RH, low_RE * corrected_R[:, None].to(low_RE.dtype), self.head,
            self.up.weight, label_R, targets.take(weight_MS) * kept_R, share,
        )  # fmt: skip
        denominator = weight_MS.sum()
        final_MS, base_MS = (
            targets.lay(best_R == label_R) for best_R in (losses.final_best_R, losses.base_best_R)
        )
        counts = {
            "final_loss": (targets.weigh(losses.final_R, weight_MS), denominator),
            "base_loss": (targets.weigh(losses.base_R, weight_MS), denominator),
            **metrics(final_MS, valid_MS, exact),
            **metrics(base_MS, valid_MS, exact, prefix="base_"),
            "lambda": (share, torch.ones_like(share)),
        }
        return StepOutput(losses.objective, denominator, counts)

    def read(self, tokens_MT: Tensor, state_1MG: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Let the GRU read tokens; returns its states after each, [M, T, G], and the last one."""
        with full_precision(tokens_MT.device):
            embedded = self.embed(tokens_MT).to(self.fc.weight.dtype)
            states_MTG, state_1MG = self.prefix_gru(embedded, state_1MG)
        assert state_1MG is not None
        return states_MTG, state_1MG

    def prefix_states(self, batch: DraftBatch, blocks: Blocks) -> Tensor:
        """Return the GRU's state for each row, after the true tokens before the one it predicts.

        [M, S, G]. Rows past the end of a sample read its last token; nothing is learned there.
        """
        length = batch.token_ids_BT.shape[1]
        index_MS = blocks.positions(self.config.block_size).clamp_max(length - 1)
        states_MSG, _ = self.read(batch.token_ids_BT[blocks.sample_M[:, None], index_MS])
        # Row k predicts the token after the k-th read, or, not shifted, the k-th itself.
        return states_MSG if self.config.shift_label else states_MSG.roll(1, 1)

    def low_rank(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Return the correction before its last map: [..., H] and [..., G] to [..., E]."""
        down, activation, _ = self.embed_proj
        joined = torch.cat([hidden, states.to(hidden.dtype)], -1)
        return activation(down(joined))  # type: ignore[no-any-return]

    @property
    def up(self) -> nn.Linear:
        """The correction's last map, E to the vocabulary."""
        last = self.embed_proj[2]
        assert isinstance(last, nn.Linear)
        return last
