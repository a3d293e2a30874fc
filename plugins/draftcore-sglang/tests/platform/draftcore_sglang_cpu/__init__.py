"""sglang on a CPU without its kernels, for tests: an out-of-tree platform, which sglang looks for.

On such a platform sglang runs its own plain torch code wherever a device may bring a kernel. So
its scheduler, batching, models and plugin seams are the real ones; its kernels and graphs are not
tested. No module is faked and nothing of sglang is changed.
"""

import importlib.util

import torch


def activate() -> str:
    """Name the platform's class; called by sglang in each of its processes, before its imports."""
    mend_torchvision()
    return "draftcore_sglang_cpu.platform.CpuPlatform"


def mend_torchvision() -> None:
    """Make the Python part of a torchvision without its compiled part importable.

    sglang imports torchvision, whose registry build wants CUDA: the library that defines these two
    operators does not load beside a CPU torch, and the Python part insists that they are there.
    """
    if importlib.util.find_spec("torchvision") is None or hasattr(torch, "_torchvision_schemas"):
        return
    schemas = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    torch._torchvision_schemas = schemas  # type: ignore[attr-defined]  # they live as long as this object
