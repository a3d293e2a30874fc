"""The P-EAGLE draft: EAGLE-3's layers on rows, and on masks that stand for tokens to be drafted.

A mask row has an embedding and a hidden input of its own, both learned: so the embedding of all tokens is
trained, and what stands for the captured layers' states passes through `fc` as these do. The target's head
is kept beside as the teacher's.

Shape letters: B batch, T tokens, S = T + 1, E pairs of an anchor and a depth (see `pairs`), C those above
depth 0, R pairs with loss, H hidden, V target and U draft vocabulary, K depths, Q queries, keys and values.
"""

from __future__ import annotations

from functools import partial

import torch
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Backbone, FirstLayer
from draftcore_nn.batches import host_mask
from draftcore_nn.layers import full_precision
from draftcore_nn.losses import teach
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore_peagle.attention import attend, seen_by
from draftcore_peagle.config import PEagleConfig
from draftcore_peagle.loss import distill
from draftcore_peagle.options import PEagleOptions
from draftcore_peagle.pairs import Drawn, Pairs, draw


class MaskedLayer(FirstLayer):
    """The first layer, which projects mask rows once: but for their positions they are alike.

    It is given embeddings of rows up to the first of those masks, and hidden inputs of all.
    """

    def project(self, embedding_BSH: Tensor, hidden_BEH: Tensor) -> Tensor:
        rows = embedding_BSH.shape[1]
        qkv_BSQ = super().project(embedding_BSH, hidden_BEH[:, :rows])
        more_BEQ = qkv_BSQ[:, -1:].expand(-1, hidden_BEH.shape[1] - rows, -1)
        return torch.cat([qkv_BSQ, more_BEQ], 1)


class PEagleDraft(Backbone):
    """The draft with its loss. What stands for features at a mask row is [1, 1, 3H], drawn from N(0, 1)."""

    first = MaskedLayer
    config: PEagleConfig
    options: PEagleOptions

    def __init__(
        self, config: PEagleConfig, options: PEagleOptions, embedding_VH: Tensor,
        head_VH: Tensor | None, ids_U: Tensor | None,
    ) -> None:  # fmt: skip
        head_VH = embedding_VH if head_VH is None else head_VH
        super().__init__(config, options, embedding_VH, head_VH, ids_U)
        del self.embed_tokens  # the target's, which is not trained
        self.embed_tokens = nn.Parameter(embedding_VH.to(torch.float32, copy=True))
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, 3 * config.hidden_size))
        self.lm_head.requires_grad_(options.train_head)

    def masked(self) -> Tensor:
        """Return the hidden input of mask rows, [H]."""
        parts = self.mask_hidden.flatten().chunk(3)
        names = (f"hidden.{layer}" for layer in self.config.layers)
        return self.combine(dict(zip(names, parts, strict=True)))

    # ------------------------------------------------------------ training

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.loss_of(batch, draw(batch, self.options, context.seed))

    def loss_of(self, batch: DraftBatch, drawn: list[Drawn]) -> StepOutput:
        """Return the loss of given pairs, which lie on the CPU, see `forward`."""
        device, mask_BT = batch.token_ids_BT.device, host_mask(batch)
        tiled = device.type == "cuda"
        pairs = Pairs.of(mask_BT, drawn, self.options.num_depths, tiled=tiled).to(device)
        rows, token_BS = Rows.of(mask_BT, 1).to(device), self.row_tokens(batch)
        output: StepOutput = self(batch, rows, pairs, token_BS)
        return output

    def row_tokens(self, batch: DraftBatch) -> Tensor:
        """Return the tokens that rows read, and after them the mask token.

        They are made before a compiled forward, to which S is a size of its own, and not T + 1.
        """
        token_BT = functional.pad(batch.token_ids_BT[:, 1:], (0, 1))
        return functional.pad(token_BT, (0, 1), value=self.config.mask_token_id)

    def forward(self, batch: DraftBatch, rows: Rows, pairs: Pairs, token_BS: Tensor) -> StepOutput:
        """Return the loss of a batch, and its metrics per depth; `train.compile` compiles this.

        The numerator is the sum over pairs of the cross entropy with the target's distribution, the
        denominator their number. Metrics: `loss_k`, `accuracy_k`, `acceptance_rate_k`.
        """
        taught_MH = rows.taught(batch.features["last_hidden"])
        teacher = teach(taught_MH, self.head, *self.target_logits, ids_U=self.token_ids())
        hidden_BEH = self.hidden(batch, pairs, token_BS)
        hidden_RH = hidden_BEH.flatten(0, 1).index_select(0, pairs.row_R)
        taught_R, depth_R = rows.slot_BT[pairs.taught_R], pairs.depth_BE.flatten()
        depth_R, exact = depth_R[pairs.row_R], teacher.own_R.dtype
        label_R, count_R = teacher.label_R[taught_R], pairs.real_R
        if self.options.skip_unknown:
            count_R = count_R & (label_R >= 0)
        with full_precision(hidden_RH.device):
            weight_R = count_R.to(exact)
            found = distill(hidden_RH, self.lm_head.weight, teacher, taught_R, weight_R)
            of_pairs = {
                "accuracy": found.best_R == label_R,
                "acceptance_rate": found.overlap_R,
                "loss": found.loss_R,
            }
            none_K = weight_R.new_zeros(self.options.num_depths)
            count_K = none_K.index_add(0, depth_R, weight_R)
            metrics: dict[str, tuple[Tensor, Tensor]] = {}
            for name, x_R in of_pairs.items():
                sum_K = none_K.index_add(0, depth_R, x_R * weight_R)
                metrics |= {f"{name}_{k}": (sum_K[k], count_K[k]) for k in range(len(none_K))}
            return StepOutput(found.total, weight_R.sum(), metrics)

    def hidden(self, batch: DraftBatch, pairs: Pairs, token_BS: Tensor) -> Tensor:
        """Run all pairs through the layers; returns normed states [B, E, H]."""
        anchor_BE, depth_BE = pairs.anchor_BE, pairs.depth_BE
        (batch_size, length), embedding_BSH = batch.token_ids_BT.shape, self.embed(token_BS)
        masked_BCH = self.masked().expand(batch_size, anchor_BE.shape[1] - length, -1)
        hidden_BEH = torch.cat([self.combine(batch.features), masked_BCH], 1)
        angles = self.rotary(anchor_BE + depth_BE)
        attention = partial(attend, seen=seen_by(anchor_BE, depth_BE, pairs.tiles))
        for layer in self.stack():
            hidden_BEH = layer(embedding_BSH, hidden_BEH, angles, attention)
        return self.norm(hidden_BEH)  # type: ignore[no-any-return]
