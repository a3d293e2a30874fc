"""Whether features are finite, in one pass: what every capture asks before anything is stored.

Apart from `local_capture`, so that a process which only writes features loads no transformers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Say whether no tensor holds inf or nan, both of which reach an extreme; none may be empty.

    No result of a tensor's size is made, and a device is waited for once: in bfloat16 on a CPU
    15 GB/s, where `isfinite().all()` takes twenty times as long or more.
    """
    extremes = torch.stack([e.double() for tensor in tensors for e in tensor.aminmax()])
    return bool(extremes.isfinite().all())
