"""What benchmarks share: lines with the time, a median, a peak, and the device's own matrix rate."""

import math
import statistics
import time

import torch
from torch import nn

from draftcore.contracts.algorithm import DraftBatch, StepContext


class Watch:
    """Prints each figure as soon as it is known, and says what `seconds` leave no time for."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), math.inf

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.began:6.1f} s  {line}", flush=True)

    def late(self, what: str) -> bool:
        if time.perf_counter() - self.began < self.seconds:
            return False
        self.say(f"{what}: left out, the time is spent")
        return True


def measure(draft: nn.Module, batch: DraftBatch) -> tuple[float, float]:
    """Return the median milliseconds of ten steps after three, and peak GiB."""
    torch.cuda.reset_peak_memory_stats()
    seconds = [step(draft, batch) for _ in range(13)][3:]
    return 1e3 * statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30


def step(draft: nn.Module, batch: DraftBatch) -> float:
    """Seconds of one forward and backward, bf16 compute over fp32 masters."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = draft(batch, StepContext(1, 2, 0))
    output.numerator.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    draft.zero_grad(set_to_none=True)
    return seconds


def bf16_rate() -> float:
    """Operations per second of a large product on this device."""
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    x @ x
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        x @ x
    torch.cuda.synchronize()
    return float(10 * 2 * 8192**3 / (time.perf_counter() - began))
