"""The platform itself; for sglang 0.5.17 to 0.5.23, where its interface changed shape."""

import psutil  # type: ignore[import-untyped]
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(SRTPlatform):  # type: ignore[misc]
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """There is one."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    # ------------------------------------------------------------ memory

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_current_memory_usage(self, device: object = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    # ------------------------------------------------------------ sglang's own classes

    def get_kv_pool_cls(self, *, kind: object) -> None:
        """From 0.5.22 on, None is sglang's own; before, the two below were asked instead."""

    def get_mha_kv_pool_cls(self) -> object:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> object:
        try:
            return super().get_paged_allocator_cls()
        except NotImplementedError:
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

            def allocator(size: int, *, page_size: int = 1, **others: object) -> object:
                assert page_size == 1
                return TokenToKVPoolAllocator(size, **others)

            return allocator

    # ------------------------------------------------------------ speculation

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "EAGLE3"

    def get_speculative_cache_locs_fn(self) -> object:
        return drafted_places


def drafted_places(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **others: object,
) -> torch.Tensor:
    """Return where in the cache each request's next tokens go, as many of each."""
    places = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], places].flatten().to(torch.int64)
