"""Wrong runners."""

from draftcore_sdk.runners import RunnerSuite

from mutants import Mutant, Mutants

RIGHT = """\
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.evaluation import eager
from draftcore.evaluation.decode import EagerRunner
from draftcore.target import EagerPrefillRunner

class Runner(eager.Eager):
    pass

@hookimpl
def describe():
    return [Offer("runner", "{name}")]

@hookimpl
def runner(name, context):
    return Runner()
"""

WRONG = {
    "refuses_every_target": Mutant(
        "test_a_plain_target_is_accepted_and_the_plan_is_text[prefill]",
        """
        class Runner(eager.Eager):
            def check(self, target):
                raise ValueError("no")
        """,
    ),
    "plans_in_numbers": Mutant(
        "test_a_plain_target_is_accepted_and_the_plan_is_text[decode]",
        """
        class Runner(eager.Eager):
            def plan(self, target):
                yield "rows", 3, "default"
        """,
    ),
    "forgets_the_stored_type": Mutant(
        "test_features_are_the_eager_ones_in_the_stored_type[bfloat16]",
        """
        class Runner(eager.Eager):
            def prefill(self, model):
                return model  # its features are of the target's own type
        """,
    ),
    "aliases_its_buffers": Mutant(
        "test_features_stay_when_the_next_batch_is_run",
        """
        class Runner(eager.Eager):
            def prefill(self, model):
                class Aliased(EagerPrefillRunner):
                    def features(self, *given):
                        new = super().features(*given)
                        self.kept = getattr(self, "kept", None) or new
                        return {name: self.kept[name].copy_(new[name]) for name in new}
                return Aliased(model)
        """,
    ),
    "swaps_rows": Mutant(
        "test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]",
        """
        class Runner(eager.Eager):
            def decode(self, model, drafter, module):
                class Swapped(EagerRunner):
                    def start(self, tokens_BT, lengths_B, *rest):
                        return super().start(tokens_BT.flip(0), lengths_B.flip(0), *rest)
                return Swapped(model, drafter)
        """,
    ),
}

RUNNERS = Mutants(RunnerSuite, {"{name}.py": RIGHT}, WRONG)
