"""Hands captured states over as files: what runs inside vLLM, whose environment has nothing of ours.

vLLM's own connector keeps the states of finished requests in a cache of their own, and writes each to a
file by CUDA's streams and pinned memory, which a CPU has not. Here a file appears under its name when it
is whole, and an answer says which layers are in it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Copied:
    """The event of a copy that is over when it returns, as on a CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Capture(ExampleHiddenStatesConnector):  # type: ignore[misc]  # none of vLLM's types is here
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        writes, answer = super().request_finished(request, block_ids)
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        layers = sorted(config.eagle_aux_hidden_state_layer_ids)  # as vLLM captures them
        return writes, answer and {**answer, "layers": layers}

    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache
        if not self._is_tp_rank_zero or cache.is_cuda:
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(cache, slots, len(pending.token_ids)).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        done = Copied()
        write = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id], self._req_futures[pending.req_id] = done, write
        write.add_done_callback(lambda future: self._on_write_done(pending.req_id, future))

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock_fd: int | None) -> None:
        event.synchronize()
        save_file(tensors, part := f"{filename}.part")
        os.replace(part, filename)
