"""Start a real decode server's engine on the CPU and print what it answers: `engine_child.py JSON`.

It runs the algorithm that does nothing. sglang's fake transfer stands for the wire: it sends a token
of each request, and no state.
"""

import json
import sys

from draftcore_sglang_cpu import mend_torchvision
from sglang_on_cpu import ARGUMENTS

mend_torchvision()  # in each process: children import this file before sglang
DECODE = {
    "speculative_algorithm": "IDLE", "speculative_num_draft_tokens": 1, "speculative_num_steps": 1,
    "speculative_eagle_topk": 1, "disable_radix_cache": True, "chunked_prefill_size": -1,
    "log_level": "error", "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}  # fmt: skip

if __name__ == "__main__":
    import sglang
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    asked = json.loads(sys.argv[1])
    engine = sglang.Engine(**ARGUMENTS, **DECODE, model_path=asked["model"])
    count = len(asked["prompts"])
    answers = engine.generate(
        input_ids=asked["prompts"],
        sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        bootstrap_host=[FAKE_BOOTSTRAP_HOST] * count,
        bootstrap_port=[8998] * count,
        bootstrap_room=list(range(count)),
    )
    print("ANSWERS", json.dumps([answer["output_ids"] for answer in answers]))
    engine.shutdown()
