"""The draft vocabulary: the target tokens a draft can propose.

A mapping is stored as *offsets*, `d2t[i] = target_id(i) - i`, because servers add `arange`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def select_tokens(counts: Mapping[int, int], draft_size: int, target_size: int) -> Tensor:
    """Return the `draft_size` most frequent target ids, ascending, int64.

    Ties go to the lower id. Where fewer tokens were seen, the lowest unseen ids fill up.
    """
    frequency_V = torch.zeros(target_size, dtype=torch.long)
    if counts:
        frequency_V[torch.tensor(list(counts.keys()))] = torch.tensor(list(counts.values()))
    ranked_V = torch.sort(frequency_V, descending=True, stable=True).indices
    return ranked_V[:draft_size].sort().values


def to_offsets(ids: Tensor) -> Tensor:
    """Turn ascending target ids into offsets `d2t`."""
    return ids - torch.arange(len(ids), device=ids.device)


def to_ids(d2t: Tensor) -> Tensor:
    """Turn offsets `d2t` into target ids."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
