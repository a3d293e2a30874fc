"""Start a real sglang engine on the CPU, ask it for tokens, print them: `engine_child.py JSON`."""

import json
import sys

from draftcore_sglang_cpu import mend_torchvision
from sglang_on_cpu import ARGUMENTS

mend_torchvision()  # in each process: children import this file before sglang

if __name__ == "__main__":
    import sglang

    asked = json.loads(sys.argv[1])
    engine = sglang.Engine(**ARGUMENTS, **asked["engine"])
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answers = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, **asked["more"])
    answers = [(answer["output_ids"], answer["meta_info"]["finish_reason"]) for answer in answers]
    print("ANSWERS", json.dumps(answers))
    engine.shutdown()
