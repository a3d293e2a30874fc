"""The graph suite catches backends that are wrong, each by the test that names the fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = """
from draftcore import hookimpl
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("graph", "mine", frozenset({CAPABILITIES}))]

@hookimpl
def graph_backend(name):
    import torch
    from draftcore.graphs import breaks
    from draftcore.graphs.recording import RecordingBackend
    from torch.utils._pytree import tree_map

    class Backend(RecordingBackend):
        pass

{wrong}
    return Backend()
"""

SUITE = """
from draftcore.testing.graphs import GraphBackendSuite

class TestSuite(GraphBackendSuite):
    plugin = "{module}"
"""

ONE_WARM_UP = """
    def once(self, key, fn):
        calls = []
        def counted():
            calls.append(1)
            return fn() if len(calls) > 1 else None
        RecordingBackend.capture_one(self, key, counted)
    Backend.capture_one = once
"""

RUNS_ANYTHING = """
    Backend.can_run = lambda self, batch, key: bool(self.tapes)
"""

KEEPS_THE_FIRST = """
    def first(self, key, fn):
        if key not in self.tapes:
            RecordingBackend.capture_one(self, key, fn)
    Backend.capture_one = first
"""

HALF_CAPTURED = """
    def can_run(self, batch, key):
        return key in self.keys
    def noted(self, key, fn):
        self.keys.add(key)
        RecordingBackend.capture_one(self, key, fn)
    Backend.keys, Backend.can_run, Backend.capture_one = set(), can_run, noted
"""

STUCK_AFTER_A_FAILURE = """
    def stuck(self, key, fn):
        assert not self.capturing
        self.capturing = True
        RecordingBackend.capture_one(self, key, fn)
        self.capturing = False
    Backend.capturing, Backend.capture_one = False, stuck
"""

REMEMBERS_OUTPUTS = """
    Backend.replay = lambda self, key: self.tapes[key].outputs
"""

RETURNS_A_TUPLE = """
    replay = Backend.replay
    def tuples(self, key):
        found = replay(self, key)
        return tuple(found.values()) if isinstance(found, dict) else found
    Backend.replay = tuples
"""

HALF_PRECISION = """
    replay = Backend.replay
    def narrow(self, key):
        halve = lambda t: t.half() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        return tree_map(halve, replay(self, key))
    Backend.replay = narrow
"""

ONE_TAPE = """
    def shared(self, key):
        return RecordingBackend.replay(self, max(self.tapes))
    Backend.replay = shared
"""

REPLAYS_TWICE = """
    def twice(self, key):
        RecordingBackend.replay(self, key)
        return RecordingBackend.replay(self, key)
    Backend.replay = twice
"""

COPIES_WEIGHTS = """
    def frozen(self, key, fn):
        RecordingBackend.capture_one(self, key, fn)
        tape = self.tapes[key]
        copies = {}
        for live, alias in tape.read.values():
            if isinstance(live, torch.nn.Parameter):
                copies[id(alias)] = alias.clone()
        swap = lambda t: copies.get(id(t), t)
        tape.steps = [(f, *tree_map(swap, (a, k)), made) for f, a, k, made in tape.steps]
    Backend.capture_one = frozen
"""

CLEANS_NOTHING = """
    Backend.cleanup = lambda self: None
"""

HOARDS_TAPES = """
    hoard = []
    def cleanup(self):
        hoard.append(dict(self.tapes))
        self.tapes.clear()
    Backend.cleanup = cleanup
"""

HOARDS_OUTPUTS = """
    hoard = []
    replay = Backend.replay
    def kept(self, key):
        found = replay(self, key)
        hoard.append(tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, found))
        return found
    Backend.replay = kept
"""

# Records what a break computed as if it were part of the graph.
FREEZES_BREAKS = """
    class Frozen:
        def eager(self, fn, args):
            return fn(*args)
    def capture(self, key, fn):
        for _ in range(2):
            fn()
        with breaks.recording(Frozen()):
            output = fn()
        from draftcore.graphs.recording import Tape
        tape = Tape()
        tape.finish(output)
        self.tapes[key] = tape
    Backend.capture_one = capture
"""

# Replays the first operation, and keeps what came after it.
STOPS_AT_A_FORK = """
    def first(self, key, fn):
        RecordingBackend.capture_one(self, key, fn)
        self.tapes[key].steps = self.tapes[key].steps[:1]
    Backend.capture_one = first
"""

NO_SUBCLASS = """
    class Backend:
        def __getattr__(self, name):
            return getattr(RecordingBackend(), name)
"""

KEEPS = "again_and_again_keeps_nothing"
CAUGHT = {
    "warms_up_once": (ONE_WARM_UP, "test_capture_calls_twice_to_warm_up_and_once_to_record"),
    "runs_anything": (RUNS_ANYTHING, "test_what_was_not_captured_cannot_run"),
    "keeps_the_first": (KEEPS_THE_FIRST, "test_a_key_captured_again_is_replaced"),
    "knows_what_failed": (HALF_CAPTURED, "test_a_failing_function_leaves_the_backend_usable[2]"),
    "is_stuck": (STUCK_AFTER_A_FAILURE, "test_a_failing_function_leaves_the_backend_usable[3]"),
    "remembers_outputs": (
        REMEMBERS_OUTPUTS,
        "test_replay_gives_what_the_function_would_on_other_contents",
    ),
    "returns_a_tuple": (
        RETURNS_A_TUPLE,
        "test_replay_gives_what_the_function_would_on_other_contents",
    ),
    "returns_halves": (
        HALF_PRECISION,
        "test_replay_gives_what_the_function_would_on_other_contents",
    ),
    "mixes_buckets": (ONE_TAPE, "test_buckets_do_not_disturb_each_other"),
    "replays_twice": (REPLAYS_TWICE, "test_replay_writes_static_buffers_once"),
    "copies_weights": (
        COPIES_WEIGHTS,
        "test_parameters_that_are_updated_in_place_are_read_as_they_are",
    ),
    "cleans_nothing": (
        CLEANS_NOTHING,
        "test_after_cleanup_nothing_runs_until_it_is_captured_again",
    ),
    "hoards_tapes": (HOARDS_TAPES, f"test_capturing_and_cleaning_up_{KEEPS}"),
    "hoards_outputs": (HOARDS_OUTPUTS, f"test_replaying_{KEEPS}"),
    "freezes_breaks": (FREEZES_BREAKS, "test_a_break_runs_on_what_is_there_at_replay"),
    "stops_at_a_fork": (
        STOPS_AT_A_FORK,
        "test_what_is_forked_off_and_joined_is_part_of_the_replay",
    ),
    "is_no_backend": (NO_SUBCLASS, "test_what_was_not_captured_cannot_run"),
    "is_right": ("", ""),
}


@pytest.fixture(scope="module")
def failures(
    wrong_folder: Path, run_suites: Callable[..., dict[str, set[str]]]
) -> dict[str, set[str]]:
    """Run every wrong backend through its test and the right one through all of them."""
    for name, (wrong, _) in CAUGHT.items():
        capabilities = next((f'"{word}s"' for word in ("break", "fork") if word in name), "")
        text = PLUGIN.replace("{wrong}", wrong).replace("{CAPABILITIES}", f"{{{capabilities}}}")
        (wrong_folder / f"{name}.py").write_text(text.replace("frozenset({})", "frozenset()"))
    return run_suites(
        {name: (SUITE.replace("{module}", name), test) for name, (_, test) in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name, (wrong, _) in CAUGHT.items() if wrong])
def test_a_wrong_backend_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name][1] in failures[name]


def test_the_right_backend_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()


def test_every_standard_test_has_caught_something() -> None:
    from draftcore.testing.graphs import GraphBackendSuite

    standard = {name for name in vars(GraphBackendSuite) if name.startswith("test_")}
    assert standard == {test.partition("[")[0] for wrong, test in CAUGHT.values() if wrong}
