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
== returns_nothing: test_the_same_inputs_give_the_same_bits
return StepOutput(terms => StepOutput(terms
== takes_a_mean: test_any_split_into_micro_batches_gives_one_update[2]
terms=[(above, => terms=[(above / below.clamp(min=1),
== scales_features_in_place: test_collate_leaves_its_samples_and_the_loss_its_batch_alone
batch = yield => samples[0].features["last_hidden"].mul_(1.01); batch = yield
== rolls_features_in_training_alone: test_the_drafter_computes_what_training_taught
decay * below, below, 1e-3 => decay * below, below, 0.0
return batch => return replace(batch, features={n: x.roll(1, 1) for n, x in batch.features.items()})
== holds_a_weight_constant_on_purpose: passes
(decay * below => (decay.detach() * decay * below
== holds_a_weight_constant: test_the_gradient_is_the_slope_of_the_loss
(decay * below => (decay.detach() * decay * below
== forgets_the_drafter: test_proposals_have_shapes_and_probabilities_as_they_must
return found => return None
"""

MUTANTS = Mutants(WrapperSuite, {"{name}.py": RIGHT}, wrong(WRONG), BODY, every_test=False)
