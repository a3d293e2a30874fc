"""The worker of an algorithm that does nothing: each round is one step of the target."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput


class IdleWorker(BaseSpecWorker):  # type: ignore[misc]
    draft_worker = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker

    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[torch.Tensor], object] | None = None, **_: Any
    ) -> GenerationBatchResult:
        lengths_B, accepted_B = batch.seq_lens.clone(), None
        if not batch.forward_mode.is_extend():
            # The last token is not in the cache yet: it is what this step reads.
            tokens = self.req_to_token_pool.req_to_token
            batch.input_ids = batch.spec_info.bonus_tokens
            batch.out_cache_loc = tokens[batch.req_pool_indices, lengths_B].to(torch.int64)
            lengths_B = lengths_B + 1
            accepted_B = torch.ones_like(lengths_B, dtype=torch.int32)
            batch.seq_lens, batch.seq_lens_cpu = lengths_B, lengths_B.cpu()
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.spec_info = None
        result = self.target_worker.forward_batch_generation(batch)
        if on_publish is not None:
            on_publish(lengths_B)
        tokens_B = result.next_token_ids.to(torch.int64)
        none = torch.zeros(len(tokens_B), 0)
        drafted = EagleDraftInput(
            topk_p=none, topk_index=none.long(), hidden_states=none, bonus_tokens=tokens_B
        )
        return GenerationBatchResult(
            logits_output=result.logits_output, next_token_ids=tokens_B, accept_lens=accepted_B,
            new_seq_lens=lengths_B, next_draft_input=drafted, speculative_num_draft_tokens=1,
        )  # fmt: skip
