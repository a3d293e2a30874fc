"""Wrong runners."""

from draftcore_sdk.runners import RunnerSuite

from mutants import Mutants, wrong

RIGHT = """\
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.evaluation import decode as eager
from draftcore.evaluation.decode import EagerRunner

class Runner(eager.Eager):
    pass

@hookimpl
def describe():
    return [Offer("runner", "{name}")]

@hookimpl
def runner(name, context):
    return Runner()
"""

WRONG = """
== refuses_every_target: test_a_plain_target_is_accepted_and_the_plan_is_text[prefill]
class Runner(eager.Eager):
    def check(self, target):
        raise ValueError("no")
== plans_in_numbers: test_a_plain_target_is_accepted_and_the_plan_is_text[decode]
class Runner(eager.Eager):
    def plan(self, target):
        yield "rows", 3, "default"
== forgets_the_stored_type: test_features_are_the_eager_ones_in_the_stored_type_and_stay[bfloat16]
class Runner(eager.Eager):
    def prefill(self, model):
        class Own:
            def features(self, tokens_BT, lengths_B, request):
                found = model.features(tokens_BT, lengths_B, request)
                return {name: value.float() for name, value in found.items()}
        return Own()
== aliases_its_buffers: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
class Runner(eager.Eager):
    def prefill(self, model):
        class Aliased:
            def features(self, *given):
                new = model.features(*given)
                self.kept = getattr(self, "kept", None) or new
                return {name: self.kept[name].copy_(new[name]) for name in new}
        return Aliased()
== swaps_rows: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Swapped(EagerRunner):
            def start(self, prompts, *rest):
                return super().start(prompts[::-1], *rest)
        return Swapped(model, drafter)
"""

MUTANTS = Mutants(RunnerSuite, {"{name}.py": RIGHT}, wrong(WRONG))
