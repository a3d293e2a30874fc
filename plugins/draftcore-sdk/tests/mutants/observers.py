"""Wrong observers: one that counts what it is told, and what is wrong there."""

from draftcore_sdk.wrappers import ObserverSuite

from mutants import Mutants, wrong
from mutants.wrappers import BODY

RIGHT = """
import random

import torch

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
-    SEEN.append(metrics["loss"])
+    return Stop("enough") if step == 2 else None
== seeds_every_step: test_it_changes_nothing_that_it_is_told
-    SEEN.append(metrics["loss"])
+    torch.manual_seed(step)
== draws_a_number: test_it_changes_nothing_that_it_is_told
-    SEEN.append(metrics["loss"])
+    SEEN.append(random.random())
== rounds_metrics: test_it_changes_nothing_that_it_is_told
-    SEEN.append(metrics["loss"])
+    metrics["loss"] = round(metrics["loss"])
== clips_gradients: test_it_changes_nothing_that_it_is_told
-    return {"largest"
+    [value.clamp_(max=0.1) for value in gradients.values()]
+    return {"largest"
== changes_weights: test_it_changes_nothing_that_it_is_told
-    return {"weights"
+    [p.data.mul_(0.99) for p in draft.module.parameters()]
+    return {"weights"
== puts_the_draft_into_another_mode: test_it_changes_nothing_that_it_is_told
-    return {"weights"
+    draft.module.train(not draft.module.training)
+    return {"weights"
== sets_an_option_of_the_run: test_it_changes_nothing_that_it_is_told
-    SEEN.append(total_steps)
+    config["train"]["lr"] = 1.0
== writes_into_a_checkpoint: test_it_changes_nothing_that_it_is_told
-    SEEN.append(folder)
+    (folder / "model.safetensors").write_bytes(b"other")
== removes_a_checkpoint: test_a_run_with_it_is_the_run_without_it
-    SEEN.append(folder)
+    [file.unlink() for file in folder.iterdir()]
== needs_a_metric_of_one_algorithm: test_a_run_with_it_is_the_run_without_it
-metrics["loss"]
+metrics["accuracy_of_head_3"]
== returns_text_for_a_metric: test_a_run_with_it_is_the_run_without_it
-{"largest": max
+{"largest": "all", "other": max
== returns_a_word_for_stop: test_it_changes_nothing_that_it_is_told
-    SEEN.append(metrics["loss"])
+    return "stop"
== starts_a_thread_that_stays: test_it_changes_nothing_that_it_is_told
-    SEEN.append(total_steps)
+    import threading, time
+    threading.Thread(target=time.sleep, args=(9,)).start()
== changes_the_current_folder: test_it_changes_nothing_that_it_is_told
-    SEEN.append(total_steps)
+    __import__("os").chdir(run)
== sets_the_global_dtype: test_it_changes_nothing_that_it_is_told
-    SEEN.append(total_steps)
+    torch.set_default_dtype(torch.float64)
== breaks_when_a_run_is_repeated: test_it_changes_nothing_that_it_is_told
-    SEEN.append(total_steps)
+    assert not SEEN, "one run at a time"
"""

MUTANTS = Mutants(ObserverSuite, {"{name}.py": RIGHT}, wrong(WRONG), BODY)
