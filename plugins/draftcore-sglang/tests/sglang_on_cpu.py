"""What tests need to run sglang on a CPU: a torchvision that imports, and arguments."""

import torch

ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 256,
    "mem_fraction_static": 0.1,
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "chunked_prefill_size": -1,
    "log_level": "error",
    "random_seed": 0,
}


def mend_torchvision() -> None:
    """The registry's torchvision is a CUDA build; beside a CPU torch two operators lack a schema."""
    if not hasattr(torch, "_torchvision_schemas"):
        schemas = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch._torchvision_schemas = schemas
