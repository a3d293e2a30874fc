"""The draft vocabulary: the target tokens a draft can propose.

A mapping is stored as *offsets*, `d2t[i] = target_id(i) - i`, because servers add `arange`. A list
of ids in its place loads everywhere and proposes nonsense, so `check_offsets` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftcore.errors import UsageError


def select_tokens(counts: Mapping[int, int], draft_size: int, target_size: int) -> Tensor:
    """Return the `draft_size` most frequent target ids, ascending, int64.

    Ties go to the lower id. Where fewer tokens were seen, the lowest unseen ids fill up. Raises
    UsageError when the draft vocabulary would be larger than the target's.
    """
    if draft_size > target_size:
        raise UsageError(
            f"draft_vocab_size {draft_size} is larger than the target's vocabulary of "
            f"{target_size} tokens\n"
            f"  set draft_vocab_size to at most {target_size}, or leave it out for all"
        )
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


def check_offsets(d2t: Tensor, target_size: int, origin: str) -> Tensor:
    """Return `d2t` if it maps to distinct, ascending target ids; raise UsageError if it cannot."""
    ids = to_ids(d2t)
    ascending = bool((ids.diff() > 0).all())
    if ascending and int(ids[0]) >= 0 and int(ids[-1]) < target_size:
        return d2t
    absolute = bool((d2t.diff() > 0).all()) and int(d2t[-1]) < target_size
    found = (
        "absolute token ids" if absolute else "ids that are not ascending or not in the vocabulary"
    )
    raise UsageError(
        f"d2t in {origin} holds {found}, where offsets are expected: target id = i + d2t[i]\n"
        f"  the target has {target_size} tokens; the mapping starts {d2t[:6].tolist()}\n"
        "  write target_id - i instead, or use the draft with the target it was trained for"
    )
