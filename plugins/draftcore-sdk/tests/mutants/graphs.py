"""Wrong graph backends: the built-in `recording`, and what each does otherwise."""

from draftcore_sdk.graphs import GraphBackendSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from draftcore_graphs import breaks
from draftcore_graphs.recording import RecordingBackend

CAPABILITIES = frozenset({"forks"})

def map_tensors(change, outputs):
    return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, outputs)

class Backend(RecordingBackend):
    pass

== Offer("graph", "{name}", CAPABILITIES)
== graph_backend(name): Backend()
"""

WRONG = """
== warms_up_once: test_capture_calls_twice_to_warm_up_and_once_to_record
Backend.capture_one(key, fn):
    calls = []
    def counted():
        calls.append(1)
        return fn() if len(calls) > 1 else None
    super().capture_one(key, counted)
== runs_anything: test_what_was_not_captured_cannot_run
Backend.can_run(batch, key): return bool(self.tapes)
== keeps_the_first: test_a_key_captured_again_is_replaced
Backend.capture_one(key, fn):
    if key not in self.tapes:
        super().capture_one(key, fn)
== knows_what_failed: test_a_failing_function_leaves_the_backend_usable[2-new]
class Backend(RecordingBackend):
    keys = set()

    def capture_one(self, key, fn):
        self.keys.add(key)
        super().capture_one(key, fn)

    def can_run(self, batch, key):
        return key in self.keys
== keeps_what_was_before_a_failure: test_a_failing_function_leaves_the_backend_usable[3-captured]
Backend.capture_one(key, fn):
    before = self.tapes.get(key)
    try:
        super().capture_one(key, fn)
    finally:
        if before:
            self.tapes.setdefault(key, before)
== renews_the_first_of_a_tuple: test_a_key_captured_again_is_replaced
class Backend(RecordingBackend):
    def capture_one(self, key, fn):
        super().capture_one(key, fn)
        found = self.tapes[key].outputs
        if isinstance(found, tuple):
            self.tapes[key].outputs = (found[0], *map_tensors(torch.clone, found[1:]))
== remembers_outputs: test_replay_gives_what_the_function_would_on_other_contents
Backend.replay(key): return self.tapes[key].outputs
== returns_a_tuple: test_replay_gives_what_the_function_would_on_other_contents
Backend.replay(key):
    found = super().replay(key)
    return tuple(found.values()) if isinstance(found, dict) else found
== replays_twice: test_replay_writes_static_buffers_once
Backend.replay(key):
    super().replay(key)
    return super().replay(key)
== copies_weights: test_parameters_that_are_updated_in_place_are_read_as_they_are
class Copying(TorchFunctionMode):
    # Gives operations copies of parameters, made when they are first used.
    def __init__(self):
        super().__init__()
        self.copies = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map_tensors(self.copied, args), **map_tensors(self.copied, kwargs or {}))

    def copied(self, t):
        if isinstance(t, torch.nn.Parameter) and id(t) not in self.copies:
            self.copies[id(t)] = t.detach().clone()
        return self.copies.get(id(t), t)
Backend.capture_one(key, fn):
    copying = Copying()
    def work():
        with copying:
            return fn()
    super().capture_one(key, work)
== cleans_nothing: test_after_cleanup_nothing_runs_until_it_is_captured_again
Backend.cleanup(): pass
== hoards_tapes: test_capturing_and_cleaning_up_again_and_again_keeps_nothing
HOARD = []
Backend.cleanup():
    HOARD.append(dict(self.tapes))
    super().cleanup()
== hoards_outputs: test_replaying_again_and_again_keeps_nothing
HOARD = []
Backend.replay(key):
    found = super().replay(key)
    HOARD.append(map_tensors(torch.clone, found))
    return found
== freezes_breaks: test_a_break_runs_on_what_is_there_at_replay
CAPABILITIES = frozenset({"breaks"})

class Frozen:
    # What a break computed first is recorded as if it were part of the graph.
    found = None

    def eager(self, fn, args):
        self.found = fn(*args) if self.found is None else self.found
        return self.found
Backend.capture_one(key, fn):
    frozen = Frozen()
    def work():
        with breaks.recording(frozen):
            return fn()
    super().capture_one(key, work)
== stops_at_a_fork: test_what_is_forked_off_and_joined_is_part_of_the_replay
class Backend(RecordingBackend):
    # Replays the first operation, and keeps what came after it.
    def capture_one(self, key, fn):
        super().capture_one(key, fn)
        self.tapes[key].steps = self.tapes[key].steps[:1]
== keys_by_rows: test_every_key_has_a_graph_of_its_own
class Backend(RecordingBackend):
    keys = frozenset()
    def capture_one(self, key, fn):
        super().capture_one(type(key)(key.rows), fn)
        self.keys = self.keys | {key}
    def can_run(self, batch, key):
        return key in self.keys
    def replay(self, key):
        return super().replay(type(key)(key.rows))
    def cleanup(self):
        super().cleanup()
        self.keys = frozenset()
== shares_its_graphs: test_another_backend_has_graphs_of_its_own
TAPES = {}
Backend.__init__():
    super().__init__()
    self.tapes = TAPES
Backend.cleanup(): TAPES.clear()
== cleans_up_the_largest_only: test_after_cleanup_nothing_runs_until_it_is_captured_again
Backend.cleanup():
    for key in [*self.tapes][:1]:
        del self.tapes[key]
== swallows_what_fails: test_a_failing_function_leaves_the_backend_usable[3-new]
from contextlib import contextmanager, suppress

class Backend(RecordingBackend):
    @contextmanager
    def capture_session(self):
        with suppress(LookupError), super().capture_session():
            yield
== keeps_gradients_of_outputs: test_a_key_captured_again_is_replaced
Backend.replay(key):
    grad = lambda t: t.clone().requires_grad_() if t.is_floating_point() else t
    with torch.inference_mode(False):
        return map_tensors(grad, super().replay(key))
== keys_by_area: test_every_key_has_a_graph_of_its_own
def area(key):
    return type(key)(key.rows * key.length, 1, key.variant)
Backend.capture_one(key, fn): super().capture_one(area(key), fn)
Backend.can_run(batch, key): return area(key) in self.tapes
Backend.replay(key): return super().replay(area(key))
== keeps_forty: test_every_key_has_a_graph_of_its_own
Backend.capture_one(key, fn):
    super().capture_one(key, fn)
    if len(self.tapes) > 40:
        del self.tapes[next(iter(self.tapes))]
== leaves_gradients_off: test_a_failing_function_leaves_the_backend_usable[1-new]: gradients
Backend.capture_one(key, fn):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    super().capture_one(key, fn)
    torch.set_grad_enabled(before)
== seeds_all: test_a_failing_function_leaves_the_backend_usable[1-new]: generator
Backend.capture_one(key, fn):
    torch.manual_seed(0)
    super().capture_one(key, fn)
== swallows_memory: test_a_failing_function_leaves_the_backend_usable[1-new]: DID NOT RAISE
Backend.capture_one(key, fn):
    try:
        super().capture_one(key, fn)
    except torch.OutOfMemoryError:
        return
== reads_lengths: test_what_was_not_captured_cannot_run
Backend.can_run(batch, key):
    return key in self.tapes and int(batch["lengths_B"].max()) <= key.length
== works_without_autocast: test_replay_gives_what_the_function_would_on_other_contents: hidden
from concurrent.futures import ThreadPoolExecutor
Backend.capture_one(key, fn):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(super().capture_one, key, fn).result()
== leaves_a_thread: test_another_backend_has_graphs_of_its_own: cleanup leaves
from concurrent.futures import ThreadPoolExecutor
Backend.capture_one(key, fn):
    self.pool = ThreadPoolExecutor(1)
    self.pool.submit(super().capture_one, key, fn).result()
== keeps_buffers_as_they_were: test_replay_gives_what_the_function_would_on_other_contents: read
Backend.capture_one(key, fn):
    super().capture_one(key, fn)
    tape = self.tapes[key]
    tape.outputs = map_tensors(lambda t: t if id(t) in tape.made else t.clone(), tape.outputs)
== loses_writes_through_views: test_replay_writes_static_buffers_once: rows are
Backend.capture_one(key, fn):
    super().capture_one(key, fn)
    tape = self.tapes[key]
    lost = lambda func, given: func._schema.is_mutable and id(given[0]) in tape.made
    tape.steps = [step for step in tape.steps if not lost(*step[:2])]
"""

MUTANTS = Mutants(GraphBackendSuite, one_file(RIGHT), wrong(WRONG), soon=2.0)
