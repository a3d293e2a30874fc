"""Wrong targets: one by transformers, and what each does otherwise."""

from draftcore_sdk.targets import TargetSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import random

import torch

from draftcore_hf.target import TransformersModel, TransformersTarget

class Model(TransformersModel):
    pass

class Target(TransformersTarget):
    def load_model(self):
        self._model = self._model or Model(self)
        return self._model

== Offer("target", "{name}", options="draftcore_hf.options:TargetOptions")
== target(name, options): Target(**options.model_dump())
"""

WRONG = """
== loads_all_at_once: test_its_config_is_there_before_its_weights
Target.__init__(*given, **options):
    super().__init__(*given, **options)
    self.load_model()
== is_known_by_its_config: test_its_fingerprint_is_that_of_its_weights
Target.fingerprint(): return str(self.config.to_dict())
== is_known_by_its_place: test_its_fingerprint_is_that_of_its_weights
Target.fingerprint(): return super().fingerprint() + self.path
== has_any_layer: test_what_it_does_not_have_is_refused
Target.require_layers(request): pass
== turns_its_embedding: test_embedding_and_head_are_as_wide_as_its_states
Target.embedding(): return super().embedding().T
== has_another_head: test_the_last_state_times_the_head_gives_its_own_logits
Target.head(): return self.embedding()
== hides_its_scale: test_the_last_state_times_the_head_gives_its_own_logits
Model.check(): pass
Model.logits(hidden): return super().logits(hidden) * 2
== gives_its_own_dtype: test_features_are_those_asked_for
class Model(Model):
    @torch.inference_mode()
    def features(self, tokens_BT, lengths_B, request):
        found = self.run(request, input_ids=tokens_BT, use_cache=False)
        return {name: found[name] for name in request.names}
== sees_its_padding: test_a_row_does_not_depend_on_what_is_beside_and_behind_it
Model.features(*given): return {n: x - x.mean(1, True) for n, x in super().features(*given).items()}
== draws_its_tokens: test_it_continues_by_the_best_token_of_its_own_forward
Model.generate(prompts, limit): return [random.choices(range(250), k=limit) for _ in prompts]
== says_less: test_it_continues_by_the_best_token_of_its_own_forward
Model.generate(*given): return [row[:-1] for row in super().generate(*given)]
== knows_no_tie: test_the_gap_is_between_its_two_best_tokens
Model.top2_gap(tokens): return 0.0
== reads_on_from_the_start: test_a_cached_forward_gives_what_a_whole_one_does
Model.forward(cache, new, starts_B, *given): return super().forward(cache, new, starts_B * 0, *given)
== keeps_what_was_taken_back: test_tokens_that_are_taken_back_leave_no_trace
Model.forward(cache, *given):
    kept = [[x.clone() for x in layer] for layer in cache]
    found = super().forward(cache, *given)
    for layer, before in zip(cache, kept):
        for new, old in zip(layer, before):
            new.copy_(torch.where(old == 0, new, old))
    return found
== takes_a_tree_for_a_chain: test_a_token_of_a_tree_sees_those_before_it_alone
Model.forward(*given): return super().forward(*given[:5])
"""

MUTANTS = Mutants(TargetSuite, one_file(RIGHT), wrong(WRONG))
