"""What devices can do, and what a target and a draft's step ask of them.

A draft's step is measured by `step_memory`, with tensors that hold nothing, and its operations
with it. A target's figures follow from the sizes of its weights, which are not read.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftcore_eval.serving import EXPERTS as EXPERT_COUNTS
from draftcore_eval.serving import GPUS
from draftcore_nn.target import EXPERTS, active_width, largest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftcore.contracts.run import OpenDraft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError, nearest
from draftcore_tools.memory import step_memory

REACHED = 0.77  # of the published operations, by large products (docs/performance.md)
STATES = 10  # of the width of a token that exist at once in a layer of the target, beside its MLP


@dataclass(frozen=True)
class Device:
    """Bytes it has, and per second: operations in bf16 and fp32, and bytes that it reads."""

    name: str
    memory: int
    bf16: float
    fp32: float
    bandwidth: float

    def rate(self, precision: object) -> float:
        """Return the operations a second of large products in a precision, or a dtype."""
        return self.fp32 if "32" in str(precision) else self.bf16


# GiB that torch sees, and FLOP/s of dense products in fp32, as published; `GPUS` has the rest.
MEMORY = {
    "a10g": (22, 31e12),
    "a100": (79, 19.5e12),
    "a100-40gb": (39, 19.5e12),
    "b200": (178, 75e12),
    "h100": (79, 67e12),
    "h200": (139, 67e12),
    "l4": (22, 30e12),
    "l40s": (44, 92e12),
    "rtx3090": (23, 36e12),
    "rtx4090": (23, 83e12),
    "rtx5090": (31, 105e12),
}


def device_named(name: str) -> Device:
    """Return a device of the table. Raises UsageError for another."""
    if (key := name.lower()) not in MEMORY:
        raise UsageError(
            f"the device {name!r} is not in the table{nearest(key, MEMORY)}\n"
            f"  known are {', '.join(MEMORY)}; without --device the run's own is measured"
        )
    (gib, fp32), (bf16, bandwidth) = MEMORY[key], GPUS[key]
    return Device(key, gib << 30, REACHED * bf16, REACHED * fp32, REACHED * bandwidth)


def device_here(device: torch.device) -> Device:
    """Measure a device of this machine, in about a second."""
    cuda = device.type == "cuda"

    def seconds(work: Any, times: int) -> float:
        work()
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / times

    def rate(dtype: torch.dtype) -> float:
        size = 8192 if cuda else 512
        x = torch.ones(size, size, dtype=dtype, device=device)
        return 2 * size**3 / seconds(lambda: x @ x.T, 5)  # as by weights; a CPU is slow at others

    x = torch.ones(1 << (28 if cuda else 24), dtype=torch.bfloat16, device=device)
    bandwidth = 2 * x.nbytes / seconds(x.clone, 5)
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    return Device(str(device), memory, rate(torch.bfloat16), rate(torch.float32), bandwidth)


@dataclass(frozen=True)
class TargetCost:
    """Bytes of a target's weights; of a token in capture the operations and the bytes at once."""

    weights: int
    operations: float
    activations: int


def target_cost(target: TargetSpec, width: int, length: float) -> TargetCost | None:
    """Count a target's weights without reading them, for rows of this length.

    None of one whose sizes transformers does not know.
    """
    from transformers.models.auto import modeling_auto

    kind = "AutoModelForImageTextToText" if target.is_multimodal else "AutoModelForCausalLM"
    text, dense, experts, ends = target.text_config, 0, 0, 0
    with suppress(Exception):
        with torch.device("meta"):
            model: Any = getattr(modeling_auto, kind).from_config(target.config)
        for name, weight in model.named_parameters():
            if weight.shape == (target.vocab_size, width):
                ends += weight.numel()
            elif ".experts." in name:
                experts += weight.numel()
            else:
                dense += weight.numel()
        weights = (dense + experts + ends) * target.dtype.itemsize
        if any(Path(target.path).glob("*.safetensors")):  # quantised ones are smaller
            weights = target.weight_bytes()
        share = largest(text, *EXPERTS) / max(1, largest(text, *EXPERT_COUNTS))
        heads = largest(text, "num_attention_heads") or 1
        attention = 2 * target.num_layers * length * heads
        attention *= largest(text, "head_dim") or width / heads
        activations = (STATES * width + 3 * active_width(text)) * target.dtype.itemsize
        return TargetCost(weights, 2 * (dense + share * experts) + attention, activations)
    return None


@dataclass(frozen=True)
class StepCost:
    """Bytes that a draft holds, and a step beside them for all rows and for one; operations a token."""

    held: int
    rows: int
    one: int
    operations: float


def step_cost(draft: OpenDraft, masks: Sequence[Tensor], share: float) -> StepCost | None:
    """Return what a step on rows of these loss masks takes, or a share where it is compiled.

    None where the algorithm reads what features hold.
    """
    with suppress(Exception):
        with FlopCounterMode(display=False) as counter:
            held, peak = step_memory(draft, list(masks))
        one = step_memory(draft, list(masks[-1:]))[1] if len(masks) > 1 else peak
        operations = counter.get_total_flops() / (len(masks) * max(map(len, masks)))
        return StepCost(held, int(share * (peak - held)), int(share * (one - held)), operations)
    return None


def with_train(draft: OpenDraft, **settings: Any) -> OpenDraft:
    """Return a draft with other settings of `train`."""
    changed, config = copy.copy(draft), draft.config
    train = config.train.model_copy(update=settings)
    changed.config = config.model_copy(update={"train": train})
    return changed


def with_option(draft: OpenDraft, option: str, value: Any) -> OpenDraft:
    """Return a draft whose algorithm has another option."""
    changed, choice = copy.copy(draft), draft.config.algorithm
    options = {**choice.options, option: value}
    changed.algorithm = draft.run.bind("algorithm", choice.name, options, choice.plugin)
    changed.options = changed.algorithm.options
    return changed
