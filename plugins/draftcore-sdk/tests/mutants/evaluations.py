"""Wrong evaluations: one that decodes, and what each does otherwise."""

from draftcore_sdk.evaluations import EvaluationSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import torch

from draftcore.contracts.run import Prompts
from draftcore_eval.evaluation import Decoding
from draftcore_eval.report import Report

class Shown(Report):
    pass

class Mine(Decoding):
    def evaluate(self, *given):
        return Shown(**vars(super().evaluate(*given)))

== Offer("evaluation", "{name}", options="draftcore_eval.options:EvalOptions")
== evaluation(name, run, options): Mine(run, options)
"""
BODY = 'plugin = "{name}"\noptions = {"max_new_tokens": 8, "batch": 2}'

WRONG = """
== reports_tensors: test_a_report_is_data_and_can_be_shown_and_written
Shown.to_json(): return {**super().to_json(), "length": torch.ones(1)}
== writes_nothing: test_a_report_is_data_and_can_be_shown_and_written
Shown.write(folder): pass
== believes_itself: test_output_that_is_not_the_targets_own_is_an_error
Mine.evaluate(*given):
    model = self.run.target.load_model()
    model.generate = type(model).generate.__get__(model)
    return super().evaluate(*given)
== rounds_weights: test_a_draft_that_was_measured_is_as_it_was
Mine.evaluate(draft, built, step):
    built.module.to(torch.bfloat16).to(torch.float32)
    return super().evaluate(draft, built, step)
== asks_by_itself: test_without_prompts_it_refuses
Mine.evaluate(*given):
    self.run.data.prompts = lambda limit=0: Prompts([[5, 6, 7]])
    return super().evaluate(*given)
== compares_nobody: test_several_drafts_are_compared_by_label
Mine.compare(reports, folder): return ["they are alike"]
== draws_a_number: test_in_training_it_leaves_no_trace
Mine.in_training(draft):
    measure = super().in_training(draft)
    return lambda built: torch.rand(1) is not None and measure(built)
== trains_on_what_is_held_out: test_in_training_it_leaves_no_trace
Mine.in_training(draft):
    measure = super().in_training(draft)
    return lambda built: [p.mul_(1.001) for p in built.module.parameters()] and measure(built)
== keeps_what_it_found: test_in_training_it_sees_weights_that_change_in_place
Mine.in_training(draft):
    measure, found = super().in_training(draft), {}
    return lambda built: found or found.update(measure(built)) or found
"""

MUTANTS = Mutants(EvaluationSuite, one_file(RIGHT), wrong(WRONG), BODY)
