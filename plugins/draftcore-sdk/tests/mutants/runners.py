"""Wrong runners."""

from draftcore_sdk.runners import RunnerSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
from draftcore_eval import decode as eager
from draftcore_eval.decode import EagerRunner

class Runner(eager.Eager):
    pass

== Offer("runner", "{name}")
== runner(name, context): Runner()
"""

WRONG = """
== refuses_every_target: test_a_plain_target_is_accepted[prefill]
Runner.check(target): raise ValueError("no")
== forgets_the_stored_type: test_features_are_the_eager_ones_in_the_stored_type_and_stay[bfloat16]
Runner.prefill(model):
    class Own:
        def features(self, tokens_BT, lengths_B, request):
            found = model.features(tokens_BT, lengths_B, request)
            return {name: value.float() for name, value in found.items()}
    return Own()
== aliases_its_buffers: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
Runner.prefill(model):
    class Aliased:
        def features(self, *given):
            new = model.features(*given)
            self.kept = getattr(self, "kept", None) or new
            return {name: self.kept[name].copy_(new[name]) for name in new}
    return Aliased()
== swaps_rows: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
Runner.decode(model, drafter, module):
    class Swapped(EagerRunner):
        def start(self, prompts, *rest):
            return super().start(prompts[::-1], *rest)
    return Swapped(model, drafter)
== is_always_greedy: test_sampling_is_seeded_and_has_the_targets_distribution
Runner.decode(model, drafter, module):
    class Greedy(EagerRunner):
        def start(self, prompts, max_len, temperature, seed):
            return super().start(prompts, max_len, 0.0, seed)
    return Greedy(model, drafter)
== ignores_the_seed: test_sampling_is_seeded_and_has_the_targets_distribution
Runner.decode(model, drafter, module):
    class Unseeded(EagerRunner):
        def start(self, prompts, max_len, temperature, seed):
            return super().start(prompts, max_len, temperature, 7)
    return Unseeded(model, drafter)
== copies_the_draft: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
import copy
Runner.decode(model, drafter, module): return EagerRunner(model, copy.deepcopy(drafter))
== takes_no_plain_step: test_plain_steps_are_the_targets_greedy_ones
Runner.decode(model, drafter, module):
    class Rows(eager.EagerRows):
        def plain(self, span):
            pass
    class Own(EagerRunner):
        def start(self, *given):
            return Rows(self, *given)
    return Own(model, drafter)
"""

MUTANTS = Mutants(RunnerSuite, one_file(RIGHT), wrong(WRONG))
