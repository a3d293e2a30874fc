"""Seals: the xxh3 digest of a tensor's bytes, and a copy that takes it on the way.

A digest of bytes that lie in memory takes 0.4 of the time of a copy, of bytes that lie in the
core's cache 0.15. So a copy that is sealed goes in pieces that fit there, each digested as soon as
it is copied: measured alone, as fast as a plain copy (docs/performance.md, 2026-11-22).
"""

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

PIECE = 512 << 10  # bytes; 128 KiB to 1 MiB do as well where the L2 cache has 1 MiB


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's bytes."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def lies_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie in this process's memory just as they are stored."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def copy_sealed(room: memoryview, source: Tensor, digest: xxhash.xxh3_64) -> None:
    """Copy a tensor, of any strides and device, to where its bytes belong.

    `digest` takes in what then lies there.
    """
    if not lies_plain(source):
        if room:
            torch.frombuffer(room, dtype=source.dtype).view(source.shape).copy_(source.detach())
        digest.update(room)
        return
    copy_bytes_sealed(room, bytes_of(source), digest)


def copy_bytes_sealed(room: memoryview, given: memoryview, digest: xxhash.xxh3_64) -> None:
    """Copy bytes to a room of their size; `digest` takes in what then lies there.

    Other threads run meanwhile: numpy's copy lets go of the interpreter's lock, a memoryview's not.
    """
    to, source = np.asarray(room), np.asarray(given)
    for start in range(0, len(room), PIECE):
        piece = slice(start, start + PIECE)
        np.copyto(to[piece], source[piece])
        digest.update(room[piece])
