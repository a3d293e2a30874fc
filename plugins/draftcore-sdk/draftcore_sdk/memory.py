"""What tensors hold: whether something keeps memory that it should have let go, and where they differ."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CYCLES = 20
SWITCHES = "default dtype", "threads", "deterministic", "float32 products"  # of `of_the_process`


@contextmanager
def watched_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield what says how many bytes tensors hold: all on a CUDA device, else those made since."""

    def held() -> int:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return torch.cuda.memory_allocated(device)
        storages = {
            item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
            for item in gc.get_objects()
            if type(item) in (Tensor, nn.Parameter)  # others may have no memory, or load lazily
        }
        return sum(storages.values())

    gc.collect()
    gc.freeze()  # to look at what a whole process holds would take a second each time
    yield held
    gc.unfreeze()


def differing(found: Tensor, right: Tensor) -> str:
    """Say how many values differ and which is the first."""
    if found.shape != right.shape or found.dtype != right.dtype:
        kinds = (f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (found, right))
        return " where it should be ".join(kinds)
    at = (found != right).nonzero()
    return f"{len(at)} of {right.numel()} values differ, first at {at[0].tolist()}"


def of_the_process() -> dict[str, Any]:
    """What training reads that belongs to no thread: random states, and how numbers are computed."""
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "Python's random state": random.getstate(), "numpy's random state": str(np.random.get_state()),
        "default dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
    }  # fmt: skip
