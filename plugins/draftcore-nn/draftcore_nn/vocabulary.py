"""The draft vocabulary: the target tokens a draft can propose.

A mapping is stored as *offsets*, `d2t[i] = target_id(i) - i`, because servers add `arange`.

Shape letters: U draft and V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftcore.errors import UsageError


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


def known_tokens(d2t: Tensor, target_size: int) -> Tensor:
    """Return which of the target's tokens the draft can propose, `t2d` as servers call it, [V]."""
    known_V = torch.zeros(target_size, dtype=torch.bool, device=d2t.device)
    return known_V.index_fill(0, to_ids(d2t), True)


def over_target(x_BU: Tensor, ids_U: Tensor, target_size: int, fill: float = 0.0) -> Tensor:
    """Lay what is said of draft tokens out over the target's, [..., V]; others get `fill`."""
    return x_BU.new_full((*x_BU.shape[:-1], target_size), fill).index_copy(-1, ids_U, x_BU)


def read_ids(
    d2t: Tensor | None, t2d: Tensor | None, draft_size: int, target_size: int, folder: Path
) -> Tensor:
    """Return the target ids of the draft vocabulary that an export's tensors name.

    Raises UsageError where they do not. A list of ids in place of offsets would load everywhere, and
    propose nonsense.
    """
    if d2t is None or tuple(d2t.shape) != (draft_size,):
        found = "no d2t" if d2t is None else f"d2t of shape {list(d2t.shape)}"
        raise UsageError(
            f"the draft in {folder} has {found}, its config a draft vocabulary of {draft_size}\n"
            "  without the mapping its tokens mean nothing: use the complete published draft"
        )
    d2t, last = d2t.long(), target_size - 1
    ids_U = to_ids(d2t)
    if not _ascending(ids_U, last):
        kind = "absolute token" if _ascending(d2t, last) else "not ascending, or unknown,"
        raise UsageError(
            f"d2t in {folder} holds {kind} ids, where offsets are expected: target id = i + d2t[i]\n"
            f"  the target has {target_size} tokens; the mapping starts {d2t[:6].tolist()}\n"
            "  write target_id - i instead, or use the draft with the target it was trained for"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids_U):
        raise UsageError(
            f"t2d and d2t in {folder} name different tokens\n"
            "  the mapping is damaged: use the complete published draft"
        )
    return ids_U


def _ascending(ids: Tensor, last: int) -> bool:
    return bool((ids.diff() > 0).all()) and 0 <= int(ids[0]) <= int(ids[-1]) <= last
