"""Wrong targets: one by transformers, and what each does otherwise."""

from draftcore_sdk.targets import TargetSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import random
from pathlib import Path

import torch

from draftcore_hf.target import TransformersModel, TransformersTarget, file_digest

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
== knows_embedding_and_head_alone: test_its_fingerprint_is_that_of_its_weights: same target
Target.fingerprint(): return str([x.sum() for x in (self.embedding(), self.head())])
== is_known_by_its_weights_alone: test_its_fingerprint_is_that_of_its_weights: rms_norm_eps
Target.fingerprint(): return "".join(map(file_digest, map(Path, sorted({*self.weight_files().values()}))))
== is_known_by_its_first_file: test_its_fingerprint_is_that_of_its_weights: last file
Target.fingerprint(): return str(self.config) + file_digest(Path(min(self.weight_files().values())))
== has_any_layer: test_what_it_does_not_have_is_refused
Target.require_layers(request): pass
== turns_its_embedding: test_embedding_and_head_are_as_wide_as_its_states
Target.embedding(): return super().embedding().T
== loads_all_for_its_embedding: test_embedding_and_head_are_as_wide_as_its_states: whole target
Target.embedding(): return self.load_model().model.get_input_embeddings().weight
== has_another_head: test_the_last_state_times_the_head_gives_its_own_logits
Target.head(): return self.embedding()
== hides_its_scale: test_the_last_state_times_the_head_gives_its_own_logits
Model.check(): pass
Model.logits(hidden): return super().logits(hidden) * 2
== forgets_its_cap: test_the_last_state_times_the_head_gives_its_own_logits: capped
Model.check(): pass
Model.logits(hidden): return self.model.get_output_embeddings()(hidden)
== checks_nothing: test_the_last_state_times_the_head_gives_its_own_logits: passes another head
Model.check(): pass
== is_left_in_training_mode: test_the_last_state_times_the_head_gives_its_own_logits
Model.__init__(*given):
    super().__init__(*given)
    self.model.train()
== norms_its_last_layer: test_features_are_those_asked_for: behind the final norm
Model.run(*given, **inputs):
    taken = super().run(*given, **inputs)
    last = f"hidden.{self.spec.num_layers - 1}"
    return taken | {last: taken["last_hidden"]} if last in taken else taken
== gives_its_own_dtype: test_features_are_those_asked_for
class Model(Model):
    @torch.inference_mode()
    def features(self, tokens_BT, lengths_B, request):
        found = self.run(request, input_ids=tokens_BT, use_cache=False)
        return {name: found[name] for name in request.names}
== sees_its_padding: test_a_row_does_not_depend_on_what_is_beside_and_behind_it
Model.features(*given): return {n: x - x.mean(1, True) for n, x in super().features(*given).items()}
== uses_its_memory_again: test_a_row_does_not_depend_on_what_is_beside_and_behind_it: memory
class Model(Model):
    kept = {}
    def features(self, *given):
        found = super().features(*given)
        for name, x in found.items():
            self.kept.setdefault((name, x.shape), torch.empty(x.shape)).copy_(x)
        return {name: self.kept[name, x.shape] for name, x in found.items()}
== takes_an_end_for_padding: test_a_cached_forward_gives_what_a_whole_one_does
Model.run(*given, **inputs):
    if "position_ids" not in inputs:
        tokens_BT = inputs["input_ids"]
        real_BT = torch.stack([tokens_BT != end for end in self.end_tokens]).all(0)
        inputs["position_ids"] = (real_BT.cumsum(-1) - 1).clamp_min(0)
    return super().run(*given, **inputs)
== has_no_place_beyond_2048: test_the_order_of_tokens_counts_as_far_as_rows_go
Model.run(*given, **inputs):
    at_1T = torch.arange(inputs["input_ids"].shape[1])[None]
    return super().run(*given, **{"position_ids": at_1T.clamp(max=2047), **inputs})
== hides_an_option: test_options_that_change_features_are_in_what_these_are_known_by: long=True
options="draftcore_hf.options:TargetOptions" => options="{name}:Options"
from draftcore_hf.options import TargetOptions
class Options(TargetOptions):
    long: bool = False
Target.__init__(*given, long=False, **options):
    super().__init__(*given, **options)
    self.long = long
Model.features(*given):
    return {name: x * (1 + self.spec.long) for name, x in super().features(*given).items()}
== decodes_by_forward: test_it_continues_by_the_best_token_of_its_own_forward: uses
Model.generate(*given):
    self.allocate(1, 1)
    return super().generate(*given)
== answers_once: test_it_continues_by_the_best_token_of_its_own_forward: earlier turns
Model.generate(prompts, limit):
    new = super().generate(prompts, limit)
    return [[] if self.end_tokens & {*row} else x for row, x in zip(prompts, new)]
== ends_as_its_config_says: test_it_continues_by_the_best_token_of_its_own_forward: generation_config
Model.__init__(*given):
    super().__init__(*given)
    self.end_tokens = frozenset([self.spec.config.eos_token_id])
== draws_its_tokens: test_it_continues_by_the_best_token_of_its_own_forward
Model.generate(prompts, limit): return [random.choices(range(250), k=limit) for _ in prompts]
== says_less: test_it_continues_by_the_best_token_of_its_own_forward
Model.generate(*given): return [row[:-1] for row in super().generate(*given)]
== knows_no_tie: test_the_gap_is_between_its_two_best_tokens
Model.top2_gap(tokens): return 0.0
== sets_the_default_dtype: test_in_bf16_its_gap_is_as_exact_and_the_process_as_it_was: default dtype
Model.__init__(spec):
    super().__init__(spec)
    torch.set_default_dtype(spec.dtype)
== draws_random_numbers: test_in_bf16_its_gap_is_as_exact_and_the_process_as_it_was: random state
Model.__init__(spec):
    super().__init__(spec)
    torch.rand(1)
== rounds_its_gap: test_in_bf16_its_gap_is_as_exact_and_the_process_as_it_was: wider type
Model.top2_gap(tokens):
    self._wider = self.model
    return super().top2_gap(tokens)
== reads_on_in_another_dtype: test_a_cached_forward_gives_what_a_whole_one_does: the model's is
Model.forward(cache, new, starts_B, span, request, *given):
    found = super().forward(cache, new, starts_B, span, request, *given)
    return request.select(found)
== leaves_rubbish_in_its_cache: test_a_cached_forward_gives_what_a_whole_one_does
Model.allocate(*given): return [[torch.empty_like(x) for x in kept] for kept in super().allocate(*given)]
== gives_a_cache_that_is_in_use: test_a_cached_forward_gives_what_a_whole_one_does: is in use
Model.allocate(*given): return self.__dict__.setdefault(f"{given}", super().allocate(*given))
== looks_back_too_far: test_a_cached_forward_gives_what_a_whole_one_does: window is of 8 tokens
class Model(Model):
    def masks(self, *given):
        config = self.spec.text_config
        before = getattr(config, "sliding_window", None)
        config.sliding_window = before and before + 1
        masks = super().masks(*given)
        config.sliding_window = before
        return masks
== does_not_look_back_far_enough: test_a_cached_forward_gives_what_a_whole_one_does: window is of 8 tokens
class Model(Model):
    def masks(self, *given):
        config = self.spec.text_config
        before = getattr(config, "sliding_window", None)
        config.sliding_window = before and before - 1
        masks = super().masks(*given)
        config.sliding_window = before
        return masks
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
