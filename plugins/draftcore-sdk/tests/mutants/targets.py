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
class Target(Target):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.load_model()
== is_known_by_its_config: test_its_fingerprint_is_that_of_its_weights
class Target(Target):
    def fingerprint(self):
        return str(self.config.to_dict())
== is_known_by_its_place: test_its_fingerprint_is_that_of_its_weights
class Target(Target):
    def fingerprint(self):
        return super().fingerprint() + self.path
== has_any_layer: test_what_it_does_not_have_is_refused
class Target(Target):
    def require_layers(self, request):
        pass
== turns_its_embedding: test_embedding_and_head_are_as_wide_as_its_states
class Target(Target):
    def embedding(self):
        return super().embedding().T
== has_another_head: test_the_last_state_times_the_head_gives_its_own_logits
class Target(Target):
    def head(self):
        return self.embedding()
== hides_its_scale: test_the_last_state_times_the_head_gives_its_own_logits
class Model(Model):
    def check(self):
        pass

    def logits(self, hidden):
        return super().logits(hidden) * 2
== gives_its_own_dtype: test_features_are_those_asked_for
class Model(Model):
    @torch.inference_mode()
    def features(self, tokens_BT, lengths_B, request):
        found = self.run(request, input_ids=tokens_BT, use_cache=False)
        return {name: found[name] for name in request.names}
== sees_its_padding: test_a_row_does_not_depend_on_what_is_beside_and_behind_it
class Model(Model):
    def features(self, tokens_BT, lengths_B, request):
        found = super().features(tokens_BT, lengths_B, request)
        return {name: value - value.mean(1, keepdim=True) for name, value in found.items()}
== draws_its_tokens: test_it_continues_by_the_best_token_of_its_own_forward
class Model(Model):
    def generate(self, prompts, max_new_tokens):
        return [[random.randrange(250) for _ in range(max_new_tokens)] for _ in prompts]
== says_less: test_it_continues_by_the_best_token_of_its_own_forward
class Model(Model):
    def generate(self, prompts, max_new_tokens):
        return [row[:-1] for row in super().generate(prompts, max_new_tokens)]
== knows_no_tie: test_the_gap_is_between_its_two_best_tokens
class Model(Model):
    def top2_gap(self, tokens):
        return 0.0
== reads_on_from_the_start: test_a_cached_forward_gives_what_a_whole_one_does
class Model(Model):
    def forward(self, cache, tokens_BT, starts_B, span, request, seen_BTT=None):
        return super().forward(cache, tokens_BT, starts_B * 0, span, request, seen_BTT)
== keeps_what_was_taken_back: test_tokens_that_are_taken_back_leave_no_trace
class Model(Model):
    def forward(self, cache, tokens_BT, starts_B, span, request, seen_BTT=None):
        kept = [[x.clone() for x in layer] for layer in cache]
        found = super().forward(cache, tokens_BT, starts_B, span, request, seen_BTT)
        for layer, before in zip(cache, kept):
            for new, old in zip(layer, before):
                new.copy_(torch.where(old == 0, new, old))
        return found
== takes_a_tree_for_a_chain: test_a_token_of_a_tree_sees_those_before_it_alone
class Model(Model):
    def forward(self, cache, tokens_BT, starts_B, span, request, seen_BTT=None):
        return super().forward(cache, tokens_BT, starts_B, span, request)
"""

MUTANTS = Mutants(TargetSuite, one_file(RIGHT), wrong(WRONG))
