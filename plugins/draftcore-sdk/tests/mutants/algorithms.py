"""Wrong algorithms: `chain_algorithm.py`, and what stands there instead of its lines."""

from pathlib import Path

from draftcore_sdk.algorithms import AlgorithmSuite

from mutants import Mutants, wrong

RIGHT = Path(__file__).with_name("chain_algorithm.py").read_text()
BODY = """
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")
"""

WRONG = """
== asks_for_a_layer_that_is_not_there: test_the_request_names_what_the_target_has
-FeatureRequest((2, target.num_layers - 3)
+FeatureRequest((2, target.num_layers)
== asks_for_another_layer_each_time: test_the_request_is_the_same_again_and_needs_no_weights
ASKED = []

@hookimpl
def feature_request(target, options):
    ASKED.append(1)
    layers = (2 + len(ASKED) % 2, target.num_layers - 3)
    return FeatureRequest(layers, last_hidden=True, dtype="float32")
== reads_weights_to_request: test_the_request_is_the_same_again_and_needs_no_weights
+    assert target.embedding().ndim == 2
     return FeatureRequest((2, target
== builds_by_the_clock: test_the_same_seed_builds_the_same_bits
 import json
+import time

+    clock = torch.Generator().manual_seed(time.time_ns() % 2**60)
+    nn.init.normal_(module.out.weight, generator=clock)
     return Draft(
         module=module,
== builds_in_half_precision: test_a_fresh_draft_is_fp32_on_the_cpu
+    module.mix.bfloat16()
     return Draft(
         module=module,
== freezes_what_is_not_there: test_frozen_names_tensors_that_are_not_trained
-frozen=frozenset({"embedding", "head"})
+frozen=frozenset({"embed_tokens", "head"})
== forgets_a_parameter: test_parameter_groups_hold_every_trainable_parameter_once
-list(module.parameters())
+list(module.parameters())[1:]
== wraps_what_is_not_there: test_wrap_units_name_submodules
-wrap_units=("mix", "out")
+wrap_units=("layers.0",)
== puts_a_type_into_its_config: test_config_is_json_data
-"steps": options.steps}
+"steps": options.steps, "dtype": torch.float32}
== keeps_state_outside_its_state_dict: test_runs_decode_losslessly_and_resume_to_the_same_bits
class Chain(Chain):
    calls = 0

    def forward(self, batch, context):
        output, self.calls = super().forward(batch, context), self.calls + 1
        numerator = output.numerator * (1 + self.calls / 100)
        return StepOutput(numerator, output.denominator, output.counts)
== keeps_a_weight_outside_its_state_dict: test_a_draft_is_its_saved_state
         self.register_buffer("head", head_VH, persistent=False)
+        self.register_buffer("scale", torch.rand(()), persistent=False)

-return state, self.norm(state) @
+return state, self.scale * self.norm(state) @
== forgets_the_first_id: test_collate_takes_one_sample_and_several
-ids=tuple(s.id for s in samples),
+ids=tuple(s.id for s in samples[1:]),
== makes_a_mask_on_the_host: test_collate_runs_where_its_samples_lie
-torch.ones_like(s.loss_mask_T) for s in samples
+s.loss_mask_T | torch.ones(len(s.loss_mask_T), dtype=torch.bool) for s in samples
== masks_samples_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
+    for s in samples:
+        s.loss_mask_T[-1] = False
     return DraftBatch(
== normalises_features_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
+        features['last_hidden'].mul_(0.5)
         names = [f
== returns_a_loss_per_step: test_loss_and_metrics_are_ratios_of_finite_scalars
-StepOutput(numerator, denominator,
+StepOutput(numerator[None], denominator[None],
== keeps_lengths_from_collate: test_the_same_inputs_give_the_same_bits
 @hookimpl
 def collate(samples):
+    Chain.longest = max(len(s.token_ids_T) for s in samples)
     pad =

-            weight = shift(mask, k + 2).to(state.dtype)
+            weight = shift(mask, k + 2) / self.longest
== seeds_torch_when_it_builds: test_the_same_seed_builds_the_same_bits
-    module = Chain(layers,
+    torch.manual_seed(0)
+    module = Chain(layers,
== has_a_term_more_for_long_batches: test_any_split_into_micro_batches_gives_one_update[4]
-        return StepOutput(numerator, denominator, counts)
+        terms = [(numerator, denominator, 1.0)] * (1 + (mask.shape[1] > 20))
+        return StepOutput(terms=terms, counts=counts)
== forgets_weights_in_its_optimizer: test_the_optimizer_moves_every_weight_as_the_schedule_says
@hookimpl
def optimizer(draft, lr):
    return torch.optim.SGD([draft.module.join.weight], lr=lr)
== schedules_nothing: test_the_optimizer_moves_every_weight_as_the_schedule_says
@hookimpl
def schedule(step):
    return 0.0
== divides_by_nothing: test_an_all_masked_batch_adds_nothing
-return StepOutput(numerator,
+return StepOutput(numerator / denominator * denominator,
== draws_from_the_global_generator: test_the_same_inputs_give_the_same_bits
-            weight = shift(mask, k + 2).to(state.dtype)
+            coins = torch.rand(mask.shape) < 0.8
+            weight = shift(mask, k + 2) * coins.to(state.dtype)
== takes_the_mean_of_the_micro_batch: test_any_split_into_micro_batches_gives_one_update[2]
-        return StepOutput(numerator, denominator, counts)
+        some = (denominator > 0).to(denominator.dtype)
+        return StepOutput(numerator / denominator.clamp(min=1), some, counts)
== counts_padding: test_padding_and_order_in_a_batch_do_not_change_the_loss
-denominator + weight.sum()
+denominator + weight.numel()
== weighs_by_place_in_the_batch: test_padding_and_order_in_a_batch_do_not_change_the_loss
-            weight = shift(mask, k + 2).to(state.dtype)
+            weight = shift(mask, k + 2) * torch.linspace(1, 2, len(mask))[:, None]
== adds_means_as_metrics: test_loss_and_metrics_are_ratios_of_finite_scalars
-"loss": (numerator.detach(), denominator)
+"loss": (numerator, denominator)
== detaches_a_part: test_gradients_reach_every_trainable_parameter
-self.out(inner)
+self.out(inner.detach())
== trains_the_targets_embedding: test_gradients_reach_none_of_the_targets_tensors
-self.register_buffer("embedding", embedding_VH, persistent=False)
+self.embedding = nn.Parameter(embedding_VH)
== has_a_wrong_backward: test_the_gradient_is_the_slope_of_the_loss
+        inner.requires_grad and inner.register_hook(lambda grad: 1.01 * grad)
         state = state + self.out(inner)
== breaks_the_graph: test_compile_gives_one_graph_for_all_batches_and_the_same_loss
+        if numerator > 0:
+            counts = dict(counts)
         return StepOutput(numerator, denominator, counts)
== answers_none_to_disagg: test_disagg_answers_an_empty_batch_with_an_empty_input
-return DraftInput(
+return len(last_tokens) and DraftInput(
== sorts_what_it_takes_over: test_disagg_gives_every_request_its_own_input
-DraftInput(batch.hidden_BH
+DraftInput(batch.hidden_BH.sort(0).values
== asks_for_another_row_each_time: test_disagg_names_the_request_and_the_field_that_is_missing
ASKED = []

@hookimpl
def disagg_row():
    ASKED.append(1)
    return ("topk",) if len(ASKED) % 2 else ()
== shifts_the_last_tokens_in_place: test_disagg_leaves_what_it_is_given_alone
+    last_tokens += 1
     return DraftInput(batch.hidden_BH, batch.topk_p_BK,
== publishes_before_it_has_an_input: test_disagg_publishes_then_stashes_and_only_with_overlap
+    if len(last_tokens):
+        future_map.publish(torch.arange(len(last_tokens)), batch.seq_lens_B)
     return DraftInput(batch.hidden_BH, batch.topk_p_BK,
== climbs: test_the_loss_falls
-return StepOutput(numerator,
+return StepOutput(2 * numerator.detach() - numerator,
== asks_for_the_next_layer: test_the_drafter_reads_what_training_captured
-FeatureRequest(module.layers
+FeatureRequest(tuple(k + 1 for k in module.layers)
== drafts_from_exchanged_layers: test_the_drafter_computes_what_training_taught
+        one, other = (f'hidden.{layer}' for layer in self.module.layers)
+        features = {**features, one: features[other], other: features[one]}
         rows = torch.arange(len(index_B))
== drafts_one_more_than_it_says: test_proposals_have_shapes_and_probabilities_as_they_must
-torch.stack(tokens[1:], 1)
+torch.stack(tokens, 1)
== states_half_of_its_probabilities: test_proposals_have_shapes_and_probabilities_as_they_must
-probs.append(probs_BV)
+probs.append(probs_BV / 2)
== samples_colder_than_it_says: test_sampled_drafts_follow_the_probabilities_they_come_with[1.0]
-torch.multinomial(probs_BV,
+torch.multinomial(probs_BV.square(),
== moves_on_when_it_proposes: test_proposing_changes_nothing
+        state.hidden_BH.copy_(hidden_BH)
         return Proposal(torch.stack(tokens[1:], 1), torch
== stops_at_what_it_drew: test_a_node_depends_on_what_is_above_and_beside_it
-        return Proposal(torch.stack(tokens[1:], 1), torch.stack(probs, 1) if probs else None)
+        stop_BK = torch.stack(tokens[1:], 1) % 2
+        counts_B = (1 - stop_BK).cumprod(1).sum(1)
+        probs = torch.stack(probs, 1) if probs else None
+        return Proposal(torch.stack(tokens[1:], 1), probs, None, counts_B)
== drafts_a_token_twice_side_by_side: test_a_node_depends_on_what_is_above_and_beside_it
class ChainDrafter(ChainDrafter):
    depth = 1

    def propose(self, state, temperature=0.0, generator=None):
        one = super().propose(state, temperature, generator)
        first_BK = one.tokens_BK[:, :1].expand_as(one.tokens_BK)
        probs = None if one.probs_BKV is None else one.probs_BKV[:, :1].expand_as(one.probs_BKV)
        return Proposal(first_BK, probs, torch.full_like(first_BK, -1))
== mixes_rows: test_a_prompt_may_be_long_or_a_single_token
-        rows = torch.arange(len(index_B))
+        rows = torch.arange(len(index_B)).roll(1)
== selects_other_rows: test_selected_rows_go_on_as_before
-State(state.hidden_BH[rows_B],
+State(state.hidden_BH[: len(rows_B)],
== puts_the_batch_second: test_a_state_is_tensors_with_the_batch_first
-torch.zeros(batch, width)
+torch.zeros(1, batch, width)
== asks_the_host_when_it_drafts: test_rounds_that_are_recorded_as_graphs_decode_the_same
+        float(state.hidden_BH.sum())
         hidden_BH, tokens, probs =
== keeps_a_copy_of_its_weights: test_a_drafter_follows_weights_that_are_updated_in_place
from copy import deepcopy

@hookimpl
def drafter(draft):
    return ChainDrafter(deepcopy(draft.module))
== rounds_the_draft_it_exports: test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it
+    draft.module.bfloat16().float()
     (folder / "config.json")
== imports_what_is_there: test_an_export_without_one_of_its_tensors_is_refused
-load_file(folder / "model.safetensors"))
-    return draft
+load_file(folder / "model.safetensors"), strict=False)
+    return draft
== exports_any_layout: test_an_unknown_layout_is_refused
-if layout != "serving":
+if not layout:
== is_served_other_layers: test_servers_draft_what_the_drafter_does
-        return self.layers
+        return tuple(layer + 1 for layer in self.layers)
== is_served_without_a_norm: test_servers_draft_what_the_drafter_does
-at.host.head_VH @ normed
+at.host.head_VH @ state
== knows_any_server: test_an_unknown_server_is_refused
-require_server(server, ["chat"])
+assert server
== exports_untrained_weights: test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it
-{name: tensor.detach()
+{name: tensor.detach() * 0
== reads_padding_at_prefill: test_what_pads_prompts_and_rounds_changes_no_draft
-        self.take(state, features, lengths_B - 1)
+        self.take(state, features, torch.full_like(lengths_B, tokens_BT.shape[1] - 1))
== takes_the_last_token_of_a_padded_round: test_what_pads_prompts_and_rounds_changes_no_draft
-tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0]
+tokens_BK[:, -1]
== goes_on_one_token_early: test_rounds_that_were_accepted_count_as_a_longer_prompt
-        self.take(state, features, counts_B - 1)
+        self.take(state, features, (counts_B - 2).clamp(min=0))
== blends_with_the_state_before: test_rounds_that_were_accepted_count_as_a_longer_prompt
-        state.hidden_BH.copy_(
+        blend = 0.1 * state.hidden_BH
+        state.hidden_BH.copy_(blend +
== holds_its_state_itself: test_a_prompt_may_be_long_or_a_single_token
class ChainDrafter(ChainDrafter):
    def prefill(self, state, tokens_BT, lengths_B, features, next_B):
        super().prefill(state, tokens_BT, lengths_B, features, next_B)
        self.only = state

    def propose(self, state, temperature=0.0, generator=None):
        if len(self.only.last_B) == len(state.last_B):
            state = self.only
        return super().propose(state, temperature, generator)
== divides_by_the_temperature_twice: test_a_temperature_sharpens_the_distributions
-            if temperature > 0:
+            logits_BV = logits_BV / temperature if temperature > 0 else logits_BV
+            if temperature > 0:
== ignores_the_temperature: test_a_temperature_sharpens_the_distributions
-torch.softmax(logits_BV / temperature, -1)
+torch.softmax(logits_BV, -1)
== draws_with_the_global_generator: test_draws_come_from_the_generator_that_is_given
-torch.multinomial(probs_BV, 1, generator=generator)
+torch.multinomial(probs_BV, 1)
== reseeds_at_every_draft: test_draws_come_from_the_generator_that_is_given
-torch.multinomial(probs_BV, 1, generator=generator)
+torch.multinomial(probs_BV, 1, generator=torch.Generator().manual_seed(0))
== flattens_its_logits: test_the_drafter_computes_what_training_taught
-            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
+            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
+            logits_BV = 0.3 * logits_BV
== norms_twice: test_training_minimises_the_cross_entropy_of_the_drafter
-            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
+            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
+            logits_BV = self.module.norm(self.module.norm(hidden_BH)) @ self.module.head.T
== halves_the_state_between_steps: test_training_minimises_the_cross_entropy_of_the_drafter
-            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
+            hidden_BH, logits_BV = self.module.advance(0.5 * hidden_BH, tokens[-1])
== draws_by_pythons_hash: test_runs_decode_losslessly_and_resume_to_the_same_bits
-        numerator, denominator = state.sum() * 0
+        for row, one in enumerate(batch.ids):
+            generator = torch.Generator().manual_seed(hash(one) % 2**32)
+            state[row] *= 1 + 0.1 * torch.rand((), generator=generator)
+        numerator, denominator = state.sum() * 0
== renormalises_its_weights_in_the_loss: test_the_loss_leaves_the_draft_as_it_is
-        counts = {"loss"
+        with torch.no_grad():
+            self.out.weight.data = self.out.weight.renorm(2, 0, 0.2)
+        counts = {"loss"
== turns_training_on_in_the_loss: test_the_loss_leaves_the_draft_as_it_is
-        state, tokens, mask = self.combine
+        self.train()
+        state, tokens, mask = self.combine
== asks_for_a_layer_it_never_reads: test_every_feature_that_is_asked_for_counts
-    return FeatureRequest((2, target
+    return FeatureRequest((2, 5, target

-def build_draft(target, options):
-    layers = feature_request(target, options).layers
+def build_draft(target, options):
+    layers = (2, target.num_layers - 3)
== keeps_the_targets_head_in_its_checkpoints: test_gradients_reach_none_of_the_targets_tensors
-self.register_buffer("head", head_VH, persistent=False)
+self.register_buffer("head", head_VH)

-frozen=frozenset({"embedding", "head"})
+frozen=frozenset({"embedding"})
== recommends_a_warmup_in_percent: test_the_recommended_settings_can_train
-warmup_ratio=0.0
+warmup_ratio=4.0
== has_no_gradient_where_nothing_is_learned: test_an_all_masked_batch_adds_nothing
-        return StepOutput(numerator, denominator, counts)
+        return StepOutput(numerator if denominator > 0 else torch.zeros(()), denominator, counts)
"""

MUTANTS = Mutants(AlgorithmSuite, {"{name}.py": RIGHT}, wrong(WRONG), BODY)
