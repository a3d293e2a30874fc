"""Wrong wrappers: a weight decay in the loss and a drafter that is watched, and what is wrong there."""

from draftcore_sdk.wrappers import WrapperSuite

from mutants import Mutants, wrong

RIGHT = """
from dataclasses import replace

from draftcore import hookimpl
from draftcore.contracts.algorithm import StepOutput


@hookimpl(wrapper=True)
def forward_loss(draft, batch, context):
    output = yield
    decay = sum(weight.square().sum() for weight in draft.module.parameters())
    ((above, below, weight),) = output.terms
    return StepOutput(terms=[(above, below, weight), (decay * below, below, 1e-3)], counts=output.counts)


@hookimpl(wrapper=True)
def collate(samples):
    batch = yield
    return batch


@hookimpl(wrapper=True)
def drafter(draft, target):
    found = yield
    return found
"""
BODY = """
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")
    capabilities = {"stop_gradient"} if "on_purpose" in plugin else ()
"""

WRONG = """
== forgets_the_denominator: test_an_all_masked_batch_adds_nothing
-(decay * below, below
+(decay, below
== returns_nothing: test_the_same_inputs_give_the_same_bits
-    return StepOutput(terms
+    StepOutput(terms
== clips_weights_in_the_loss: test_the_loss_leaves_the_draft_as_it_is
-    decay = sum(weight
+    [weight.data.mul_(0.999) for weight in draft.module.parameters()]
+    decay = sum(weight
== draws_noise_for_the_loss: test_the_same_inputs_give_the_same_bits
-terms=[(above,
+terms=[(above * (1 + 0.1 * __import__("torch").rand(())),
== cuts_the_graph: test_loss_and_metrics_are_ratios_of_finite_scalars
-terms=[(above, below, weight), (decay * below,
+terms=[(above.detach(), below, weight), (0 * decay * below,
== takes_a_mean: test_any_split_into_micro_batches_gives_one_update[3]
-terms=[(above,
+terms=[(above / below.clamp(min=1),
== counts_metrics_with_a_gradient: test_loss_and_metrics_are_ratios_of_finite_scalars
-counts=output.counts)
+counts={**output.counts, "decay": (decay, below)})
== doubles_the_weight_of_long_batches: test_any_split_into_micro_batches_gives_one_update[4]
-below, weight), (
+below, weight * batch.token_ids_BT.shape[1]), (
== learns_prompts_too: test_an_all_masked_batch_adds_nothing
 def collate(samples):
     batch = yield
-    return batch
+    return replace(batch, loss_mask_BT=batch.attention_mask_BT)
== drops_a_row: test_collate_takes_one_sample_and_several
 def collate(samples):
     batch = yield
-    return batch
+    return replace(batch, ids=batch.ids[:-1])
== scales_features_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
 def collate(samples):
+    samples[0].features["last_hidden"].mul_(1.01)
     batch = yield
== rolls_features_in_training_alone: test_the_drafter_computes_what_training_taught
-@hookimpl(wrapper=True)
 def forward_loss

 def collate(samples):
     batch = yield
-    return batch
+    return replace(batch, features={name: value.roll(1, 1) for name, value in batch.features.items()})
== drafts_other_tokens_than_it_drew: test_sampled_drafts_follow_the_probabilities_they_come_with[1.0]
     found = yield
-    return found
+    old = found.propose
+    def propose(state, temperature=0.0, generator=None):
+        drafts = old(state, temperature, generator)
+        if drafts.probs_BKV is None:
+            return drafts
+        return replace(drafts, tokens_BK=drafts.probs_BKV.argmax(-1))
+    found.propose = propose
+    return found
== holds_a_weight_constant_on_purpose: passes
-(decay * below
+(decay.detach() * decay * below
== holds_a_weight_constant: test_the_gradient_is_the_slope_of_the_loss
-(decay * below
+(decay.detach() * decay * below
== forgets_the_drafter: test_proposals_have_shapes_and_probabilities_as_they_must
     found = yield
-    return found
+    return None
"""

MUTANTS = Mutants(WrapperSuite, {"{name}.py": RIGHT}, wrong(WRONG), BODY, every_test=False)
