"""Wrong runners: the eager one, and what each does otherwise."""

from draftcore_sdk.runners import RunnerSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import copy

import torch

from draftcore_eval import decode as eager

class Rows(eager.EagerRows):
    pass

class Decoder(eager.EagerRunner):
    def start(self, prompts, max_len, temperature, seed):
        return Rows(self, prompts, max_len, temperature, seed)

class Features:
    def __init__(self, model):
        self.model, self.kept = model, {}

    def features(self, *given):
        return self.model.features(*given)

class Runner(eager.Eager):
    def prefill(self, model):
        return Features(model)

    def decode(self, model, drafter, module):
        return Decoder(model, drafter)

== Offer("runner", "{name}")
== runner(name, context): Runner()
"""

WRONG = """
== refuses_every_target: test_a_plain_target_is_accepted[prefill]
Runner.check(target): raise ValueError("no")
== forgets_the_stored_type: test_features_are_the_eager_ones_in_the_stored_type_and_stay[bfloat16]
Features.features(*given): return {name: x.float() for name, x in self.model.features(*given).items()}
== aliases_its_buffers: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
Features.features(*given):
    with torch.inference_mode():
        [value.zero_() for value in self.kept.values()]
    self.kept = self.model.features(*given)
    return self.kept
== swaps_rows: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
Decoder.start(prompts, *rest): return super().start(prompts[::-1], *rest)
== is_always_greedy: test_sampling_is_seeded_and_has_the_targets_distribution
Decoder.start(prompts, longest, _, seed): return super().start(prompts, longest, 0.0, seed)
== ignores_the_seed: test_sampling_is_seeded_and_has_the_targets_distribution
Decoder.start(*given): return super().start(*given[:3], 7)
== copies_the_draft: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
Runner.decode(model, drafter, module): return Decoder(model, copy.deepcopy(drafter))
== takes_no_plain_step: test_plain_steps_are_the_targets_greedy_ones
Rows.plain(span): pass
"""

MUTANTS = Mutants(RunnerSuite, one_file(RIGHT), wrong(WRONG))
