"""The pairs of an anchor and a depth that a step trains on, drawn as P-EAGLE's COD sampling does.

A pair (a, d) is row a of a sample drafting its token d: at depth 0 the row reads its own token and
features, at depth d > 0 the mask token and the learned hidden state, at position a + d. Its teacher and
its weight are those of row a + d. Depth 0 has all rows, as others see them. Depth 1 is drawn from the n
rows to be learned, depth d + 1 from the rows to be learned that follow one drawn at depth d: so a pair's
anchor has every smaller depth, too. Depth d has floor((n - d) max(r^d, r_min)) pairs, or all there are.

A sample's pairs are drawn by a generator of their own, seeded by (run seed, sample id, epoch), on the CPU:
they depend neither on the batch nor on what was drawn before, and no step waits for the device. A sample
is one document; no anchor lies before its first row.

Shape letters: B batch, T tokens, C pairs of depths above 0, E = T + C all pairs, R pairs with loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from draftcore_nn.batches import generator_of, host_mask
from draftcore_nn.losses import padded
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, OnDevice
from draftcore_peagle.attention import tiles_of

if TYPE_CHECKING:
    from draftcore_peagle.options import PEagleOptions

Drawn = tuple[Tensor, Tensor]  # anchors, and depths above 0


@dataclass(frozen=True)
class Pairs(OnDevice):
    """The pairs of a batch: the rows at depth 0, then of each sample those above, by anchor and depth.

    Samples with fewer have some at anchor -1, before the others: they see each other, and nothing sees
    them. row_R are the pairs with loss, flat b*E + e, and taught_R their teachers' rows, flat b*T + t, filled
    up where `real_R` is false. `tiles` are for FlexAttention.
    """

    anchor_BE: Tensor
    depth_BE: Tensor
    row_R: Tensor
    taught_R: Tensor
    real_R: Tensor
    tiles: Mapping[str, Tensor]

    @classmethod
    def of(cls, mask_BT: Tensor, drawn: Sequence[Drawn], depths: int, *, tiled: bool) -> Pairs:
        """Lay pairs out, by the mask of rows on the CPU."""
        (batch, length), most = mask_BT.shape, max(len(anchors) for anchors, _ in drawn)
        anchor_BC, depth_BC = (
            torch.stack([functional.pad(x, (most - len(x), 0), value=fill) for x in side])
            for side, fill in zip(zip(*drawn, strict=True), (-1, depths), strict=True)
        )
        rows_BT = torch.arange(length, device=mask_BT.device).expand(batch, -1)
        anchor_BE = torch.cat([rows_BT, anchor_BC], 1)
        depth_BE = torch.cat([torch.zeros_like(rows_BT), depth_BC], 1)
        place_BE = (anchor_BE + depth_BE).clamp_max(length - 1)
        learned_BE = mask_BT.gather(1, place_BE) & (anchor_BE >= 0)
        row_R = learned_BE.flatten().nonzero()[:, 0]
        missing = padded(len(row_R)) - len(row_R)
        real_R = functional.pad(torch.ones_like(row_R, dtype=torch.bool), (0, missing))
        row_R = functional.pad(row_R, (0, missing))
        sample_B1 = torch.arange(batch, device=mask_BT.device)[:, None]
        taught_R = (place_BE + length * sample_B1).flatten()[row_R]
        tiles = tiles_of(anchor_BE, length) if tiled else {}
        return cls(anchor_BE, depth_BE, row_R, taught_R, real_R, tiles)


def draw(batch: DraftBatch, options: PEagleOptions, seed: int) -> list[Drawn]:
    """Draw the pairs of every sample of a batch, in ascending order of anchors and depths."""
    return [
        draw_pairs(learned_T, options, generator_of(sample, seed))
        for learned_T, sample in zip(host_mask(batch), batch.ids, strict=True)
    ]


def draw_pairs(learned_T: Tensor, options: PEagleOptions, generator: torch.Generator) -> Drawn:
    """Draw the pairs of a sample, of which these rows are to be learned."""
    learned_T = functional.pad(learned_T, (0, 1))  # the row after the last is none
    seeds = _choose(learned_T.nonzero()[:, 0], options.max_anchors, generator)
    places, anchors, depths = seeds[seeds > 0], [seeds[:0]], [seeds[:0]]
    for depth in range(1, options.num_depths):
        share = max(options.down_sample_ratio**depth, options.down_sample_ratio_min)
        places = _choose(places, int(max(0, len(seeds) - depth) * share), generator)
        anchors.append(places - depth)
        depths.append(torch.full_like(places, depth))
        places = places + 1
        places = places[learned_T[places]]
    anchor, depth_ = torch.cat(anchors), torch.cat(depths)
    order = (anchor * options.num_depths + depth_).argsort()
    return anchor[order], depth_[order]


def _choose(places: Tensor, most: int | None, generator: torch.Generator) -> Tensor:
    """Choose so many of the places, all for None, and keep their order."""
    order = torch.randperm(len(places), generator=generator)
    return places[order[:most].sort().values]
