"""Wrong observers: one that counts what it is told, and what is wrong there."""

from draftcore_sdk.wrappers import ObserverSuite

from mutants import Mutants, wrong
from mutants.wrappers import BODY

RIGHT = """
import random

from draftcore import hookimpl
from draftcore.contracts.algorithm import Stop

SEEN = []

@hookimpl
def run_started(run, config, total_steps):
    SEEN.append(total_steps)

@hookimpl
def gradients_ready(step, gradients):
    return {"largest": max(float(value.abs().max()) for value in gradients.values())}

@hookimpl
def step_finished(step, metrics, draft):
    SEEN.append(metrics["loss"])

@hookimpl
def eval_metrics(draft, report):
    return {"weights": float(sum(p.square().sum() for p in draft.module.parameters()))}

@hookimpl
def checkpoint_saved(step, folder):
    SEEN.append(folder)
"""

WRONG = """
== stops_early: passes
SEEN.append(metrics["loss"]) => return Stop("enough") if step == 2 else None
== draws_a_number: test_it_changes_nothing_that_it_is_told
SEEN.append(metrics["loss"]) => SEEN.append(random.random())
== changes_weights: test_it_changes_nothing_that_it_is_told
return {"weights" => [p.data.mul_(0.99) for p in draft.module.parameters()]; return {"weights"
== removes_a_checkpoint: test_a_run_with_it_is_the_run_without_it
SEEN.append(folder) => [file.unlink() for file in folder.iterdir()]
== returns_text_for_a_metric: test_a_run_with_it_is_the_run_without_it
return {"largest": max => return {"largest": "all", "other": max
"""

MUTANTS = Mutants(ObserverSuite, {"{name}.py": RIGHT}, wrong(WRONG), BODY)
