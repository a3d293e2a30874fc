"""What tests give sglang where it runs on the CPU: arguments of its ServerArgs, and as flags."""

from typing import Any

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "max_total_tokens": 4096,
    "max_running_requests": 32,
    "context_length": 512,
    "mem_fraction_static": 0.1,
    "disable_cuda_graph": True,
    "random_seed": 0,
}


def flags(arguments: dict[str, Any]) -> list[str]:
    """The same for sglang's launcher; True is a flag alone."""
    names = {"--" + name.replace("_", "-"): value for name, value in arguments.items()}
    return [name if value is True else f"{name}={value}" for name, value in names.items()]
