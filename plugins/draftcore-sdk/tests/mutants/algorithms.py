"""Wrong algorithms: the one that `new-plugin` writes, and promises added, with what each does otherwise."""

from dataclasses import replace

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.new_plugin import render

from mutants import Mutants, patched, wrong

# It compiles, is handed over by prefill servers, and is read by a server named `chat`.
PROMISES = """
-from draftcore.contracts.capture import FeatureRequest
-from draftcore_nn import batches, serving
+import itertools
+from copy import deepcopy
+from dataclasses import replace
+
+import torch
+from draftcore.contracts.capture import FeatureRequest
+from draftcore.contracts.serving import DraftInput
+from draftcore_nn import batches, serving
+from draftcore_nn.served import Suspect, require_server

-ARCHITECTURE = "ChainDraft"
+ARCHITECTURE, COUNT, rms_norm = "ChainDraft", itertools.count(), torch.nn.functional.rms_norm

-    def collate(self, samples
+    def disagg_row(self):
+        return ("hidden", "topk")
+
+    def build_disagg_draft_input(self, batch, last_tokens, future_map):
+        return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)
+
+    def read_export(self, folder, server):
+        require_server(server, ["chat"])
+        return Served(serving.read_tensors(folder, {}))
+
+    def collate(self, samples

-class ChainAlgorithm
+class Served:
+    server, ignored, most = "chat", (), None
+
+    def __init__(self, read):
+        self.read, self.facts = read, {"hidden_size": len(read["cell.down.weight"])}
+
+    def captured(self, host):
+        return ()
+
+    def suspects(self, host, trained):
+        return [Suspect("it is another draft", self)]
+
+    def normed(self, x, of):
+        return rms_norm(x, x.shape, self.read[f"cell.{of}_norm.weight"], 1e-6)
+
+    def logits(self, at, drafts_K):
+        state, logits = at.last_hidden_TH[-1], []
+        for token in [at.last, *drafts_K.tolist()]:
+            token_H = self.normed(at.host.embedding_VH[token], "token")
+            both = torch.cat([self.normed(state, "state"), token_H])
+            gate, up = (self.read[f"cell.{part}.weight"] @ both for part in ("gate", "up"))
+            inner = torch.nn.functional.silu(gate) * up
+            state = state + self.read["cell.down.weight"] @ inner
+            logits.append(at.host.head_VH @ state)
+        return torch.stack(logits)
+
+
+class ChainAlgorithm

-            examples=[{"steps": 3, "decay": 1.0, "inner_size": 40, "num_drafts": 4}],
-        )
+        )

-frozenset({"cross_entropy", "layout:serving"})
+frozenset({"compile", "disagg", "cross_entropy", "layout:serving", "served:chat"})

-            labels_R = tokens_BT[:, k + 1 :][counting]
-            loss_R, best_R = cross_entropy(state_BTH[counting], self.head, labels_R)
-            weight, number, right = self.decay ** (k - 1), counting.sum(), best_R == labels_R
+            labels_R, counting_R = tokens_BT[:, k + 1 :].flatten(), counting.flatten()
+            logits_RV = (state_BTH @ self.head.T).flatten(0, 1)
+            loss_R = functional.cross_entropy(logits_RV, labels_R, reduction="none") * counting_R
+            weight, number = self.decay ** (k - 1), counting.sum()
+            right = (logits_RV.argmax(-1) == labels_R) & counting_R

-def build(target
+def scaled(output, by):
+    return StepOutput(output.numerator * by, output.denominator, output.counts)
+
+
+def build(target

-from dataclasses import dataclass
+from dataclasses import dataclass, replace

-            choices.append(choose(state_BH @ self.draft.head.T, temperature, generator))
+            logits_BV = state_BH @ self.draft.head.T
+            choices.append(choose(logits_BV, temperature, generator))
"""
FILES = render("{name}", "algorithm").items()
RIGHT = {path: text for path, text in FILES if path.startswith("draftcore_{name}/")}
RIGHT = {**patched(RIGHT, PROMISES), "{name}.py": "from draftcore_{name}.plugin import *\n"}
BODY = """
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")
"""

WRONG = """
== asks_for_a_layer_that_is_not_there: test_the_request_names_what_the_target_has
ChainAlgorithm.feature_request(target): return FeatureRequest((target.num_layers,), True, "float32")
== reads_weights_to_request: test_the_request_is_the_same_without_weights
ChainAlgorithm.feature_request(target): return target.head().ndim and super().feature_request(target)
== builds_by_the_clock: test_the_same_seed_builds_the_same_bits
init_linears(module) => init_linears(module, torch.Generator().seed() % 2**20 / 2**24)
== builds_in_the_targets_type: test_a_fresh_draft_is_fp32_on_the_cpu
init_linears(module) => init_linears(module.to(target.dtype))
== freezes_what_is_not_there: test_frozen_names_tensors_that_are_not_trained
frozen=ChainDraft.FROZEN => frozen=frozenset({"embedding", "target_head"})
== forgets_a_parameter: test_parameter_groups_hold_every_trainable_parameter_once
list(module.parameters()) => list(module.parameters())[1:]
== wraps_what_is_not_there: test_wrap_units_name_submodules
wrap_units=("cell",) => wrap_units=("layers.0",)
== puts_a_type_into_its_config: test_config_is_json_data
"inner_size": inner_size} => "inner_size": inner_size, "dtype": torch.float32}
== keeps_state_outside_its_state_dict: test_runs_decode_losslessly_and_resume_to_the_same_bits
ChainDraft.calls: return vars(self).setdefault("counted", itertools.count())
ChainDraft.forward(batch): return scaled(super().forward(batch), 1 + next(self.calls) / 100)
import itertools
== keeps_a_weight_outside_its_state_dict: test_a_draft_is_its_saved_state
self.steps, self.decay = steps, decay => self.steps, self.decay = steps, float(torch.rand(()))
== keeps_the_last_id: test_collate_takes_one_sample_and_several
ChainAlgorithm.collate(samples): return replace(super().collate(samples), ids=(samples[-1].id,))
== makes_a_mask_on_the_host: test_collate_runs_where_its_samples_lie
ChainAlgorithm.collate(samples):
    batch = super().collate(samples)
    there = batch.attention_mask_BT & torch.ones(batch.attention_mask_BT.shape, dtype=torch.bool)
    return replace(batch, attention_mask_BT=there)
== masks_samples_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
ChainAlgorithm.collate(samples):
    for sample in samples:
        sample.loss_mask_T[-1] = False
    return super().collate(samples)
== normalises_features_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
features["last_hidden"] => features["last_hidden"].mul_(0.5)
== returns_a_loss_per_step: test_loss_and_metrics_are_ratios_of_finite_scalars
StepOutput(numerator, denominator, => StepOutput(numerator[None], denominator[None],
== keeps_lengths_from_collate: test_the_same_inputs_give_the_same_bits
ChainAlgorithm.collate(samples):
    ChainDraft.longest = max(len(sample.token_ids_T) for sample in samples)
    return super().collate(samples)
ChainDraft.forward(batch): return scaled(super().forward(batch), self.longest)
== seeds_torch_when_it_builds: test_the_same_seed_builds_the_same_bits
init_linears(module) => torch.manual_seed(0) and init_linears(module)
== keeps_slow_weights_beside_its_state: test_the_optimizer_moves_every_weight_as_the_schedule_says: resumed
ChainAlgorithm.optimizer(draft, lr, weight_decay):
    return Slow(draft.module.parameters(), lr, weight_decay=weight_decay)
Slow(torch.optim.SGD).step():
    super().step()
    weights = self.param_groups[0]["params"]
    slow = vars(self).setdefault("slow", [weight.detach().clone() for weight in weights])
    for weight, mean in zip(weights, slow):
        mean.copy_(weight.data.lerp_(mean, 0.5))
== schedules_by_its_calls: test_the_optimizer_moves_every_weight_as_the_schedule_says: the schedule
ChainAlgorithm.schedule(step): return 1 + next(COUNT) / 100
== forgets_weights_in_its_optimizer: test_the_optimizer_moves_every_weight_as_the_schedule_says
ChainAlgorithm.optimizer(draft, lr, weight_decay):
    return torch.optim.SGD([draft.module.cell.down.weight], lr=lr, weight_decay=weight_decay)
== divides_by_nothing: test_an_all_masked_batch_adds_nothing
StepOutput(numerator, => StepOutput(numerator / denominator * denominator,
== draws_from_the_global_generator: test_the_same_inputs_give_the_same_bits
counting = mask_BT[:, k + 1 :] => counting = mask_BT[:, k + 1 :] & (torch.rand(()) < 0.5)
== takes_the_mean_of_the_micro_batch: test_any_split_into_micro_batches_gives_one_update[2]
ChainDraft.forward(batch):
    output = super().forward(batch)
    above, below, counts = output.numerator, output.denominator, output.counts
    return StepOutput(above / below.clamp(min=1), (below > 0).to(below.dtype), counts)
== counts_padding: test_padding_and_order_in_a_batch_do_not_change_the_loss
denominator + weight * number => denominator + weight * counting.numel()
== cuts_long_rows: test_rows_may_be_of_more_than_4096_tokens_and_of_one: its end does not count
mask_BT[:, k + 1 :] => mask_BT[:, k + 1 :].where(torch.arange(tokens_BT.shape[1])[k + 1 :] < 512, False)
== weighs_by_place_in_the_batch: test_padding_and_order_in_a_batch_do_not_change_the_loss
ChainDraft.forward(batch): return scaled(super().forward(batch), batch.loss_mask_BT[0].sum())
== adds_means_as_metrics: test_loss_and_metrics_are_ratios_of_finite_scalars
"accuracy": (hits, total) => "accuracy": (numerator, total)
== counts_in_half_precision: test_thousands_of_tokens_add_up_row_by_row
denominator + weight * number => denominator + weight * number.half()
== clips_what_stands_out_of_its_batch: test_thousands_of_tokens_add_up_row_by_row
"none") * counting_R => "none") * counting_R; loss_R = loss_R.clamp(max=loss_R.quantile(0.99))
== detaches_a_part: test_gradients_reach_every_trainable_parameter
self.gate(both) => self.gate(both).detach()
== trains_the_targets_embedding: test_gradients_reach_none_of_the_targets_tensors
ChainDraft.__init__(*given):
    super().__init__(*given)
    del self.embed_tokens
    self.embed_tokens = nn.Parameter(given[3])
== has_a_wrong_backward: test_the_gradient_is_the_slope_of_the_loss
Cell.forward(*given):
    state = super().forward(*given)
    state.requires_grad and state.register_hook(lambda grad: 1.01 * grad)
    return state
== doubles_its_loss_alone: test_the_gradient_is_the_slope_with_each_choice_of_an_option: with doubled
+    doubled: bool = False
     steps: int = Field(

     init_linears(module)
+    module.doubled = options.doubled

-        return StepOutput(numerator,
+        numerator = numerator + self.doubled * numerator.detach()
+        return StepOutput(numerator,
== breaks_the_graph: test_compile_gives_one_graph_for_all_batches_and_the_same_loss
numerator = numerator + weight => numerator = numerator + (number > 0).item() * weight
== answers_none_to_disagg: test_disagg_answers_an_empty_batch_with_an_empty_input
return DraftInput( => return len(last_tokens) and DraftInput(
== sorts_what_it_takes_over: test_disagg_gives_every_request_its_own_input
DraftInput(batch.hidden_BH => DraftInput(batch.hidden_BH.sort(0).values
== asks_for_another_row_each_time: test_disagg_names_the_request_and_the_field_that_is_missing
ChainAlgorithm.disagg_row(): return ("topk",) if next(COUNT) % 2 else ()
== shifts_the_last_tokens_in_place: test_disagg_leaves_what_it_is_given_alone
topk_index_BK, last_tokens) => topk_index_BK, last_tokens.add_(1))
== hands_on_a_clamped_state: test_disagg_hands_on_what_rows_hold_bit_for_bit
DraftInput(batch.hidden_BH => DraftInput(batch.hidden_BH.clamp(-60, 60)
== answers_with_a_buffer_of_its_own: test_disagg_hands_on_what_rows_hold_bit_for_bit
ChainAlgorithm.held(hidden_BH):
    key = str((hidden_BH.shape, hidden_BH.dtype))
    return vars(self).setdefault(key, hidden_BH.clone()).copy_(hidden_BH)
DraftInput(batch.hidden_BH => DraftInput(self.held(batch.hidden_BH)
== makes_the_last_tokens_on_the_host: test_disagg_answers_where_the_rows_lie_and_waits_for_nothing
topk_index_BK, last_tokens) => topk_index_BK, torch.tensor(last_tokens.tolist(), dtype=torch.long))
== claims_to_need_the_last_token_only: test_disagg_asks_for_the_state_that_drafts_go_on_from
"disagg", "cross_entropy" => "disagg-stateless", "cross_entropy"
== writes_into_the_relay: test_disagg_leaves_what_it_is_given_alone
+        future_map.output_tokens_buf[: len(last_tokens)] = last_tokens
         return DraftInput(
== publishes_before_it_has_an_input: test_disagg_publishes_then_stashes_and_only_with_overlap
+        if len(last_tokens):
+            future_map.publish(torch.arange(len(last_tokens)), batch.seq_lens_B)
         return DraftInput(
== climbs: test_the_loss_falls
StepOutput(numerator, => StepOutput(2 * numerator.detach() - numerator,
== asks_for_the_next_layer: test_the_drafter_reads_what_training_captured
FeatureRequest(layers=(), last_hidden=True, dtype=dtype) => FeatureRequest((1,), True, dtype)
== states_half_of_its_probabilities: test_proposals_have_shapes_and_probabilities_as_they_must
chain(choices) => chain([(token_B, p if p is None else p / 2) for token_B, p in choices])
== samples_colder_than_it_says: test_sampled_drafts_follow_the_probabilities_they_come_with[1.0]
+            choices[-1] = choose(2 * logits_BV, temperature, generator)[0], choices[-1][1]
             token_B, _ = choices[-1]
== draws_from_its_256_best_tokens: test_sampled_drafts_follow_the_probabilities_they_come_with[200.0]
+            least_B1 = logits_BV.topk(256).values[:, -1:]
+            best_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
+            choices[-1] = choose(best_BV, temperature, generator)[0], choices[-1][1]
             token_B, _ = choices[-1]
== moves_on_when_it_proposes: test_proposing_changes_nothing
+        state.state_BH.copy_(state_BH)
         return chain(choices)
== stops_at_what_it_drew: test_a_node_depends_on_what_is_above_and_beside_it
choose(logits_BV, => choose(0.1 * logits_BV,
ChainDrafter.propose(*given):
    found = super().propose(*given)
    return replace(found, counts_B=(found.tokens_BK % 2).cumprod(1).sum(1))
== drafts_a_token_twice_side_by_side: test_a_node_depends_on_what_is_above_and_beside_it
ChainDrafter.depth: return 1
chain(choices) => replace(chain(choices[:1] * 5), parents_BK=torch.full((len(token_B), 5), -1))
== counts_positions_in_bf16: test_neighbours_are_told_apart_far_into_a_text
self.draft.enter(features), lengths_B - 1 => self.draft.placed(self.draft.enter(features)), lengths_B - 1
ChainDraft.placed(x): return (x * torch.arange(x.shape[1])[:, None].bfloat16().float().cos()).cumsum(1)
== mixes_rows: test_a_prompt_may_be_long_or_a_single_token
at(self.draft.enter(features), => at(self.draft.enter(features).roll(1, 0),
== selects_other_rows: test_selected_rows_go_on_as_before
select_rows(state, rows_B) => select_rows(state, torch.arange(len(rows_B)))
== puts_the_batch_second: test_a_state_is_tensors_with_the_batch_first
weight.new_zeros(batch, => weight.new_zeros(1, batch,
== asks_the_host_when_it_drafts: test_rounds_that_are_recorded_as_graphs_decode_the_same
self.draft.embed(token_B)) => self.draft.embed(token_B) + float(token_B.sum() * 0))
== keeps_a_copy_of_its_weights: test_a_drafter_follows_weights_that_are_updated_in_place
ChainAlgorithm.drafter(draft, target): return super().drafter(deepcopy(draft), target)
== forgets_an_option_when_it_reads: test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it[steps=3]
"inner_size", folder)), self.options) => "inner_size", folder)), type(self.options)())
implementation="draftcore_{name} => examples=[{"steps": 3}], implementation="draftcore_{name}
== rounds_the_draft_it_exports: test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it
"architectures": [ARCHITECTURE] => "architectures": [draft.module.bfloat16().float() and ARCHITECTURE]
== imports_what_is_there: test_an_export_without_a_tensor_is_refused
-        serving.fill(draft.module, serving.read_tensors(folder, {}), folder)
+        draft.module.load_state_dict(serving.read_tensors(folder, {}), strict=False)
== exports_any_layout: test_an_unknown_layout_is_refused
write_export(folder, layout, => write_export(folder, "serving",
== is_served_without_a_norm: test_servers_draft_what_the_drafter_does
self.normed(state, "state") => state
== knows_any_server: test_an_unknown_server_is_refused
require_server(server, ["chat"]) => assert server
== reads_padding_at_prefill: test_what_pads_prompts_and_rounds_changes_no_draft
at(self.draft.enter(features), lengths_B - 1) => self.draft.enter(features)[:, -1]
== takes_the_last_token_of_a_padded_round: test_what_pads_prompts_and_rounds_changes_no_draft
at(tokens_BK, counts_B - 1) => tokens_BK[:, -1]
== goes_on_one_token_early: test_rounds_that_were_accepted_count_as_a_longer_prompt
enter(features), counts_B - 1 => enter(features), (counts_B - 2).clamp(min=0)
== holds_its_state_itself: test_a_prompt_may_be_long_or_a_single_token
ChainDrafter.prefill(state, *given):
    super().prefill(state, *given)
    self.only = state
ChainDrafter.propose(state, *given):
    same = len(self.only.token_B) == len(state.token_B)
    return super().propose(self.only if same else state, *given)
== ignores_the_temperature: test_a_temperature_sharpens_the_distributions
choose(logits_BV, temperature, => choose(logits_BV, float(temperature > 0),
== reseeds_at_every_draft: test_draws_come_from_the_generator_that_is_given
temperature, generator)) => temperature, torch.Generator().manual_seed(0)))
== flattens_its_logits: test_the_drafter_computes_what_training_taught
choose(logits_BV, => choose(0.1 * logits_BV,
== trains_on_sums_of_rows: test_the_drafter_reads_as_far_back_as_training
state_BTH = self.enter(batch.features) => state_BTH = self.enter(batch.features).cumsum(1)
== norms_before_the_head: test_training_minimises_the_cross_entropy_of_the_drafter
logits_BV = state_BH => logits_BV = self.draft.cell.state_norm(state_BH)
== halves_the_state_between_steps: test_training_minimises_the_cross_entropy_of_the_drafter
token_B, _ = choices[-1] => token_B, state_BH = choices[-1][0], 0.5 * state_BH
== draws_by_pythons_hash: test_the_same_inputs_give_the_same_bits: with hash() as in another process
ChainDraft.forward(batch): return scaled(super().forward(batch), 1 + hash(batch.ids) % 1000 / 10000)
== shrinks_its_weights_in_the_loss: test_the_loss_leaves_the_draft_as_it_is
ChainDraft.forward(batch):
    self.cell.down.weight.data *= 0.99
    return super().forward(batch)
== turns_training_on_in_the_loss: test_the_loss_leaves_the_draft_as_it_is
ChainDraft.forward(batch): return self.train() and super().forward(batch)
== asks_for_a_layer_it_never_reads: test_every_feature_that_is_asked_for_counts
ChainAlgorithm.feature_request(target): return FeatureRequest((5,), True, "float32")
== keeps_the_targets_head_in_its_checkpoints: test_gradients_reach_none_of_the_targets_tensors
ChainDraft.__init__(*given):
    super().__init__(*given)
    self.register_buffer("target_head", self.target_head)
frozen=ChainDraft.FROZEN => frozen=frozenset({"embed_tokens"})
== recommends_a_warmup_in_percent: test_the_recommended_settings_can_train
warmup_ratio=0.04 => warmup_ratio=4.0
== draws_alike_in_each_epoch: test_what_is_drawn_depends_on_the_runs_seed_and_on_the_epoch: the epoch
ChainAlgorithm.forward_loss(draft, batch, context):
    output = super().forward_loss(draft, batch, context)
    output.terms = [(n * (context.seed + len(batch.ids[0].feature_id)), d, w) for n, d, w in output.terms]
    return output
== draws_by_ids_alone: test_what_is_drawn_depends_on_the_runs_seed_and_on_the_epoch: `context.seed`
ChainDraft.forward(batch): return scaled(super().forward(batch), len(batch.ids[0].feature_id))
== returns_early_where_nothing_is_learned: test_nothing_to_learn_calls_all_units_and_reaches_all_weights
ChainDraft.forward(batch):
    nothing = sum(0 * weight.sum() for weight in self.parameters())
    return super().forward(batch) if batch.loss_mask_BT.any() else StepOutput(nothing, nothing.detach())
== sums_in_bf16: test_a_step_in_bf16_is_that_of_fp32_but_for_rounding
StepOutput(numerator, => StepOutput(numerator.to(logits_RV.dtype),
== calls_no_unit_for_short_rows: test_nothing_to_learn_calls_all_units_and_reaches_all_weights
ChainDraft.forward(batch):
    nothing = sum(0 * weight.sum() for weight in self.parameters())
    short = batch.token_ids_BT.shape[1] < 2
    return StepOutput(nothing, nothing.detach()) if short else super().forward(batch)
== casts_the_draft_that_it_drafts_with: test_drafting_for_a_target_in_bf16_leaves_the_weights_in_fp32
ChainAlgorithm.drafter(draft, target):
    draft.module.to(target.dtype)
    return super().drafter(draft, target)
== takes_the_end_token_for_padding: test_training_minimises_the_cross_entropy_of_the_drafter
counting.flatten() => (counting & (tokens_BT[:, k + 1 :] != 257)).flatten()
== exports_nothing_of_an_option: test_an_export_says_what_made_its_draft
+    doubled: bool = False
     steps: int = Field(

     init_linears(module)
+    module.cell.factor = 1 + options.doubled

-        change: Tensor = self.down(
+        change: Tensor = self.factor * self.down(
== makes_a_constant_on_the_host: test_the_loss_makes_its_tensors_where_its_batch_lies
counting = mask_BT[:, k + 1 :] => counting = mask_BT[:, k + 1 :] & (torch.arange(rows) >= 0)
== keeps_every_batch: test_step_after_step_keeps_nothing
ChainDraft.forward(batch):
    vars(self).setdefault("kept", []).append(batch.token_ids_BT.clone())
    return super().forward(batch)
== adds_noise_to_held_out_losses: test_a_held_out_loss_has_no_noise
ChainAlgorithm.forward_loss(draft, batch, context):
    output = super().forward_loss(draft, batch, context)
    output.terms = [(n * (1 + context.seed / 1000), d, w) for n, d, w in output.terms]
    return output
== learns_the_first_rows_alone: test_every_part_of_a_long_text_is_learned: 40 to 79
counting = mask_BT[:, k + 1 :] => counting = mask_BT[:, k + 1 :] & (mask_BT[:, k + 1 :].cumsum(1) < 10)
== rounds_the_slots_of_its_cache: test_a_state_holds_as_many_positions_as_are_asked_for
ChainDrafter.allocate(batch, max_len):
    self.slots = max_len // 8 * 8
    return super().allocate(batch, max_len)
ChainDrafter.prefill(state, tokens_BT, *given):
    assert tokens_BT.shape[1] + self.num_drafts <= self.slots
    super().prefill(state, tokens_BT, *given)
== drafts_the_tokens_that_came_first: test_a_part_of_the_vocabulary_is_of_the_most_frequent_tokens
ChainAlgorithm.build_draft(target, data):
    draft = super().build_draft(target, data)
    hidden_V = torch.full((target.vocab_size,), -torch.inf)
    draft.module.hidden_V = hidden_V.index_fill(0, torch.tensor([*data.token_counts][:99]), 0)
    return draft
choose(logits_BV, => choose(self.draft.hidden_V + logits_BV,
== ignores_a_warm_start: test_a_warm_start_begins_with_what_was_exported
+    warm_start: str | None = None
     steps: int = Field(
== counts_hits_twice: test_metrics_are_in_their_range
"accuracy": (hits, total) => "accuracy": (2 * hits, total)
== averages_its_metrics: test_metrics_add_up_over_micro_batches: return sums as metrics
"accuracy": (hits, total) => "accuracy": (hits / total, total / total)
== seeds_torch_in_the_loss: test_building_the_loss_and_decoding_leave_the_process_as_it_is
ChainDraft.forward(batch): return torch.manual_seed(1) and super().forward(batch)
== never_learns_token_0: test_every_part_of_a_long_text_is_learned: token 0 is never learned
counting = mask_BT[:, k + 1 :] => counting = mask_BT[:, k + 1 :] & (tokens_BT[:, k + 1 :] != 0)
== cuts_texts: test_collate_takes_one_sample_and_several: a batch has 2048
ChainAlgorithm.collate(samples): return super().collate([self.cut(s) for s in samples])
ChainAlgorithm.cut(s):
    features = {name: x[:2048] for name, x in s.features.items()}
    return type(s)(s.id, s.token_ids_T[:2048], s.loss_mask_T[:2048], features)
== schedules_a_rate: test_the_optimizer_moves_every_weight_as_the_schedule_says: no rate itself
ChainAlgorithm.schedule(step): return 6e-4 / step
== fixes_its_rate: test_the_optimizer_moves_every_weight_as_the_schedule_says: train.lr is ignored
list(module.parameters())} => list(module.parameters()), "lr": 1e-3}
== drops_the_decay: test_the_optimizer_moves_every_weight_as_the_schedule_says: weight_decay is ignored
ChainAlgorithm.optimizer(draft, lr, betas): return torch.optim.AdamW(draft.parameter_groups, lr, betas)
== exports_nothing_of_the_targets_norms: test_an_export_says_what_made_its_draft: rms_norm_eps
     init_linears(module)
+    module.cell.factor = 1 + target.text_config.rms_norm_eps

-        change: Tensor = self.down(
+        change: Tensor = self.factor * self.down(
== counts_what_it_does_not_know: test_the_drafter_computes_what_training_taught: rounds that know
ChainDrafter.propose(state, *given):
    return replace(super().propose(state, *given), counts_B=1 + state.token_B % 2)
== ramps_to_its_last_step: test_loss_and_metrics_are_ratios_of_finite_scalars: ZeroDivision
ChainAlgorithm.forward_loss(draft, batch, context):
    output, share = super().forward_loss(draft, batch, context), context.step / (context.total_steps - 1)
    output.terms = [(n * share, d, w) for n, d, w in output.terms]
    return output
== counts_hits_of_other_labels: test_metrics_are_in_their_range: knows all
"accuracy": (hits, total) => "accuracy": ((hits / 10).floor(), total)
"""

# It learns the target's distribution of a token instead of the token.
DISTILS = """
"cross_entropy", "layout:serving", => "distils", "layout:serving",
init_linears(module) => vars(module).update(capped=target.capped), init_linears(module)
functional.cross_entropy(logits_RV, labels_R, => functional.cross_entropy(logits_RV, self.taught(batch, k),
ChainDraft.taught(batch, k):
    state_BTH = batch.features["last_hidden"][:, k:-1].to(self.compute_dtype)
    return self.capped(state_BTH @ self.head.T).softmax(-1).flatten(0, 1)
"""
WITH = "test_training_minimises_the_cross_entropy_with_the_targets_distribution"
DISTILLING = f"""
== distils: passes {WITH}
== sees_one_future_row: test_the_loss_reads_nothing_that_comes_after_what_it_predicts: sees the future
state_BTH = self.enter(batch.features) => state_BTH = self.enter(batch.features).roll(-1, 1)
== distils_from_logits_as_they_are: test_what_the_target_teaches_has_its_scale_and_soft_cap: forgotten
module).update(capped=target.capped) => module).update(capped=lambda logits: logits)
== distils_from_logits_without_a_cap: {WITH}: the soft cap of the target's logits is forgotten
module).update(capped=target.capped) => module).update(capped=lambda logits: 2 * logits)
"""

MUTANTS = Mutants(
    AlgorithmSuite,
    RIGHT,
    {
        **wrong(WRONG),
        **{
            name: replace(mutant, change=DISTILS.strip("\n") + "\n" + mutant.change)
            for name, mutant in wrong(DISTILLING).items()
        },
    },
    BODY,
)
