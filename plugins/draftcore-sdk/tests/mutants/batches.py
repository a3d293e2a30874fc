"""Wrong batches: the queue, and what each does otherwise."""

from draftcore_sdk.batches import BatchesSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import contextlib
import dataclasses
import threading

from draftcore.errors import UsageError
from draftcore_disagg import queue, queued

class Batches:
    def __init__(self, batches):
        self.batches = batches

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def __iter__(self):
        return iter(self.batches)

class Source(queued.QueueSource):
    @contextlib.contextmanager
    def open(self, needed):
        with super().open(needed) as batches:
            yield Batches(batches)

== Offer("batches", "{name}")
== batches(name, run): Source(run)
"""
BODY = """
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")

    def producing(self, file, plugins):
        from draftcore_sdk.batches import by_producers

        return by_producers(file, plugins)
"""
WRONG = """
== rounds_features: test_a_run_is_that_which_captures_for_itself
Batches.__iter__():
    for loaded in self.batches:
        for at, sample in enumerate(loaded.samples if loaded else ()):
            rounded = {n: v.bfloat16().to(v.dtype) for n, v in sample.features.items()}
            loaded.samples[at] = dataclasses.replace(sample, features=rounded)
        yield loaded
== turns_rows_around: test_a_run_is_that_which_captures_for_itself
Batches.__iter__():
    for loaded in self.batches:
        if loaded:
            loaded.samples[:] = loaded.samples[:1] * len(loaded.samples)
        yield loaded
== tries_once: test_a_batch_whose_capture_failed_is_tried_again
queue.ATTEMPTS = 1
== leaves_out_whole_batches: test_a_row_that_cannot_be_captured_is_left_out_alone
Queue(queue.Queue)._failed(entry, error, *, again=False):
    reasons = dict.fromkeys(entry.task.batch.rows, "one of them is torn")
    self.skipped.add(reasons)
    entry.task = queue.without_rows(entry.task, self.skipped)
    entry.refs = ()

queued.Queue = Queue
== starts_once: test_a_run_that_was_stopped_goes_on_to_the_same_bits
Source.open(needed):
    if list(self.run.folder.glob("checkpoints/step-*")):
        raise UsageError("it has begun already")
    return super().open(needed)
== leaves_a_thread_behind: test_who_captures_hears_the_end
Source.open(needed):
    threading.Thread(target=threading.Event().wait, args=[30], name="mine").start()
    return super().open(needed)
== fails_at_its_end: test_who_captures_hears_the_end
Batches.end(state): pass
"""

MUTANTS = Mutants(BatchesSuite, one_file(RIGHT), wrong(WRONG), BODY, soon=5.0)
