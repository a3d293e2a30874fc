"""Wrong runners."""

from draftcore_sdk.runners import RunnerSuite

from mutants import Mutants, wrong

RIGHT = """\
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore_eval import decode as eager
from draftcore_eval.decode import EagerRunner

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
== refuses_every_target: test_a_plain_target_is_accepted[prefill]
class Runner(eager.Eager):
    def check(self, target):
        raise ValueError("no")
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
== is_always_greedy: test_sampling_is_seeded_and_has_the_targets_distribution
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Greedy(EagerRunner):
            def start(self, prompts, max_len, temperature, seed):
                return super().start(prompts, max_len, 0.0, seed)
        return Greedy(model, drafter)
== ignores_the_seed: test_sampling_is_seeded_and_has_the_targets_distribution
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Unseeded(EagerRunner):
            def start(self, prompts, max_len, temperature, seed):
                return super().start(prompts, max_len, temperature, 7)
        return Unseeded(model, drafter)
== accepts_nothing: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[5]
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Rows(eager.EagerRows):
            def verify(self, span):
                drafts = self.drafter
                found = super().verify(span)
                return (found[0], found[1].clamp(max=1), *found[2:])
        class Own(EagerRunner):
            def start(self, *given):
                return Rows(self, *given)
        return Own(model, drafter)
== returns_the_whole_bucket: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
import torch

class Runner(eager.Eager):
    def prefill(self, model):
        class Own:
            def features(self, tokens_BT, lengths_B, request):
                found = model.features(tokens_BT, lengths_B, request)
                pad = torch.nn.functional.pad
                return {name: pad(v, (0, 0, 0, 24, 0, 3)) for name, v in found.items()}
        return Own()
== keeps_the_first_request: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
class Runner(eager.Eager):
    def prefill(self, model):
        class Own:
            first = None
            def features(self, tokens_BT, lengths_B, request):
                self.first = self.first or request
                return model.features(tokens_BT, lengths_B, self.first)
        return Own()
== copies_the_draft: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
import copy

class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        return EagerRunner(model, copy.deepcopy(drafter))
== runs_full_batches_only: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[3]
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Full(EagerRunner):
            def reserve(self, rows, max_len):
                self.rows = rows
            def start(self, prompts, *given):
                assert len(prompts) == self.rows, "graphs of these rows only"
                return super().start(prompts, *given)
        return Full(model, drafter)
== cannot_report: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[1]
class Runner(eager.Eager):
    ran = False
    def prefill(self, model):
        self.ran = True
        return model
    def decode(self, model, drafter, module):
        self.ran = True
        return EagerRunner(model, drafter)
    def report(self):
        return [("replayed", 3)] if self.ran else []
== takes_no_plain_step: test_plain_steps_are_the_targets_greedy_ones
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Rows(eager.EagerRows):
            def plain(self, span):
                pass
        class Own(EagerRunner):
            def start(self, *given):
                return Rows(self, *given)
        return Own(model, drafter)
== pads_in_place: test_features_are_the_eager_ones_in_the_stored_type_and_stay[float32]
class Runner(eager.Eager):
    def prefill(self, model):
        class Own:
            def features(self, tokens_BT, lengths_B, request):
                found = model.features(tokens_BT, lengths_B, request)
                tokens_BT.zero_()
                return found
        return Own()
== starts_with_the_first_batchs_state: test_decoding_gives_the_tokens_and_rounds_of_eager_decoding[5]
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Own(EagerRunner):
            first = None
            def start(self, prompts, *given):
                rows = eager.EagerRows(self, prompts, *given)
                self.first = self.first or {n: v.clone() for n, v in rows.state.items()}
                if len(self.first["last_B"]) == len(prompts):
                    rows.state = dict(self.first)
                return rows
        return Own(model, drafter)
== drafts_at_another_temperature: test_sampling_is_seeded_and_has_the_targets_distribution
class Runner(eager.Eager):
    def decode(self, model, drafter, module):
        class Rows(eager.EagerRows):
            def verify(self, span):
                self.temperature, kept = self.temperature * 3, self.temperature
                found = super().verify(span)
                self.temperature = kept
                return found
        class Own(EagerRunner):
            def start(self, *given):
                return Rows(self, *given)
        return Own(model, drafter)
"""

MUTANTS = Mutants(RunnerSuite, {"{name}.py": RIGHT}, wrong(WRONG))
