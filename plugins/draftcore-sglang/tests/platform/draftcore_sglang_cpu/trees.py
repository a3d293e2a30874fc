"""What sglang 0.5.23 has no place for in a platform: trees of EAGLE, and transfers without pinned memory.

Two functions for trees are refused by name where an out-of-tree platform comes to them. sglang has
Triton kernels of its own for both, which it takes on Intel's GPUs alone; Triton's interpreter runs
them on a CPU (TRITON_INTERPRET=1).
"""

from typing import Any


def register() -> None:
    """Replace the two through sglang's own hook registry; called by sglang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module = "sglang.kernels.ops.speculative.spec_tree"
    for name, ours in (
        ("build_tree_kernel_efficient_func", build),
        ("verify_tree_greedy_func", verify),
    ):
        HookRegistry.register(f"{module}.{name}", ours, HookType.REPLACE)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", unpinned, HookType.AFTER)


def unpinned(made: Any, *asked: Any, **more: Any) -> Any:
    """Let a prefill server send places in the cache as other senders do, not through pinned memory."""
    if hasattr(made, "supports_host_tensor_indices"):
        made.supports_host_tensor_indices = False
    return made


def build(*arguments: Any) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*arguments)


def verify(topk: int = -1, **tensors: Any) -> tuple[Any, Any, Any]:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**tensors)
    return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]
