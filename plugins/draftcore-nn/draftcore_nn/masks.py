"""What training rows see, said once: as a table, as a bias, and as the tiles of FlexAttention.

A rule `sees(b, head, query, key)` says which queries see which keys, as FlexAttention's `mask_mod`.
Elsewhere than on CUDA `dense` makes a table of it. Tiles are found before a compiled forward, which then
makes nothing as large as the table; `listed` takes those that follow from numbers, as of `blocks`.

Shape letters: B batch, Q queries, T keys, N blocks of a sample, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import OnDevice

if TYPE_CHECKING:  # it brings torch's compiler, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128
LISTS = [
    f"{kind}{side}_{what}"
    for kind in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def documents(document_BT: Tensor) -> Rule:
    """Let rows see themselves, and what stands before them in their own document: a sample has several."""

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document_BT[b, query] == document_BT[b, key])

    return sees


def blocks(
    anchor_BN: Tensor, block_size: int, length: int | Tensor, *, window: int | None = None,
    causal: bool = False,
) -> Rule:  # fmt: skip
    """Let rows of blocks see the context before their block's anchor, and their own block.

    Queries are the rows of all N blocks of a sample; keys are its context, so long, and then these rows.
    Of what is compiled `length` is a tensor: FlexAttention fails where a number is found to be fixed, as
    the length of a batch that is as long as the model is wide.
    With a window a row sees so many positions, its own included; `causal` is about rows of one block.
    """

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, own = anchor_BN[b, query // block_size], key - length
        context = key < anchor
        block = own // block_size == query // block_size
        if window is not None:
            context = context & (key > anchor + query % block_size - window)
        if causal:
            block = block & (own <= query)
        return torch.where(key < length, context, block)

    return sees


def dense(rule: Rule, shape: tuple[int, int, int], device: torch.device | str = "cpu") -> Tensor:
    """Return a rule as a table [B, 1, Q, T] in bool; `shape` is [B, Q, T]."""
    batch, queries, keys = (torch.arange(count, device=device) for count in shape)
    seen = rule(batch[:, None, None], batch.new_zeros(()), queries[:, None], keys)
    return seen.expand(shape)[:, None]


def bias(seen_B1QT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, as `attention.attend` takes it: 0 where something is seen.

    What is hidden gets a large negative score, not an infinite one, with room to be scaled and added to:
    a row that sees nothing then weighs exactly 0 under a softmax that is joined with further keys.
    """
    length = seen_B1QT.shape[-1]
    # CUDA's kernel wants rows of the bias to start at multiples of 16 elements.
    padding = (0, -length % 16) if seen_B1QT.is_cuda else (0, 0)
    hidden = functional.pad(~seen_B1QT, padding).to(dtype)
    return (hidden * (torch.finfo(dtype).min / 4))[..., :length]


@dataclass(frozen=True)
class Tiles(OnDevice):
    """The tiles of scores in which something is seen: `BlockMask`'s own lists."""

    lists: Mapping[str, Tensor]

    @classmethod
    def of(cls, rule: Rule, shape: tuple[int, int, int], device: torch.device | str) -> Tiles:
        """Find a rule's tiles, where its tensors lie; `shape` is [B, Q, T]."""
        from torch.nn.attention.flex_attention import create_block_mask

        batch, queries, keys = shape
        found = create_block_mask(rule, batch, None, queries, keys, device, BLOCK_SIZE=TILE)
        return cls({name: getattr(found, name) for name in LISTS})

    def mask(self, rule: Rule, shape: tuple[int, int]) -> BlockMask:
        """Return them with what is seen within a tile, for FlexAttention; `shape` is [Q, T]."""
        from torch.nn.attention.flex_attention import BlockMask

        form: dict[str, Any] = {"seq_lengths": shape, **self.lists}
        return BlockMask(BLOCK_SIZE=(TILE, TILE), mask_mod=rule, **form)


def listed(partly_BIJ: Tensor, whole_BIJ: Tensor) -> dict[str, Tensor]:
    """List the tiles in which something is seen, and those in which all is, as `BlockMask` does."""
    lists = {}
    for kind, seen_BIJ in (("", partly_BIJ), ("full_", whole_BIJ)):
        for side, seen in (("kv", seen_BIJ), ("q", seen_BIJ.mT.contiguous())):
            lists[f"{kind}{side}_num_blocks"] = seen.sum(-1)[:, None].int()
            # Those that are seen stand first in a list of all.
            order = (~seen).int().argsort(stable=True)
            lists[f"{kind}{side}_indices"] = order[:, None].int()
    return lists
