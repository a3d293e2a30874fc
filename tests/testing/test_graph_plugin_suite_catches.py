"""The suite of graph plugins catches those that are wrong, each by the test that names the fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = """
from draftcore import hookimpl
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("graph-plugin", "mine", frozenset([{CAPABILITIES}]))]

@hookimpl
def graph_plugin(name):
    import torch
    from draftcore.graphs import GraphPlugin

    class Plugin(GraphPlugin):
        # Counts the tokens that are live, and does the rows of a prefill one by one.
        def __init__(self):
            self.count_1 = torch.zeros(1, dtype=torch.long)

        def on_capture(self, key, batch, work):
            self.on_replay(key, batch)
            if "tokens_BT" not in batch:
                return work

            def one_by_one(batch):
                rows = [
                    work({name: value[row : row + 1] for name, value in batch.items()})
                    for row in range(key.rows)
                ]
                return self.joined(rows)

            return one_by_one

        def joined(self, rows):
            first = rows[0]
            if isinstance(first, torch.Tensor):
                return torch.cat(rows)
            if isinstance(first, dict):
                return {name: self.joined([row[name] for row in rows]) for name in first}
            if isinstance(first, tuple):
                return tuple(self.joined(list(parts)) for parts in zip(*rows))
            return None

        def on_replay(self, key, batch):
            self.count_1.copy_((batch["lengths_B"] * batch["live_B"]).sum())

{wrong}
    return Plugin()
"""

SUITE = """
from draftcore.testing.graph_plugins import GraphPluginSuite

class TestSuite(GraphPluginSuite):
    plugin = "{module}"
"""

NO_SUBCLASS = """
    class Plugin:
        on_capture, on_replay = Plugin.on_capture, Plugin.on_replay
"""

# Rows that are done apart in the wrong order.
BACKWARDS = """
    def joined(self, rows):
        return {name: torch.cat([row[name] for row in rows[::-1]]) for name in rows[0]}
    Plugin.joined = joined
"""

LOSES_A_KEY = """
    joined = Plugin.joined
    def fewer(self, rows):
        found = joined(self, rows)
        return {"found": found["found"]} if isinstance(found, dict) and "found" in found else found
    Plugin.joined = fewer
"""

FREEZES_THE_BATCH = """
    def on_capture(self, key, batch, work):
        copies = {name: value.clone() for name, value in batch.items()}
        return lambda batch: work(copies)
    Plugin.on_capture = on_capture
"""

WORKS_TWICE = """
    def on_capture(self, key, batch, work):
        return lambda batch: (work(batch), work(batch))[1]
    Plugin.on_capture = on_capture
"""

SWALLOWS_ERRORS = """
    def on_capture(self, key, batch, work):
        def careful(batch):
            try:
                return work(batch)
            except LookupError:
                return None
        return careful
    Plugin.on_capture = on_capture
"""

CLAMPS_THE_BATCH = """
    on_replay = Plugin.on_replay
    def clamping(self, key, batch):
        batch["lengths_B"].clamp_(max=1)
        on_replay(self, key, batch)
    Plugin.on_replay = clamping
"""

MOVES_ITS_BUFFER = """
    def on_replay(self, key, batch):
        self.count_1 = (batch["lengths_B"] * batch["live_B"]).sum()
    Plugin.on_replay = on_replay
"""

COUNTS_PADDING = """
    def on_replay(self, key, batch):
        self.count_1.copy_(batch["lengths_B"].sum())
    Plugin.on_replay = on_replay
"""

WAITS = """
    def on_replay(self, key, batch):
        self.count_1.fill_(int((batch["lengths_B"] * batch["live_B"]).sum()))
    Plugin.on_replay = on_replay
"""

HOARDS_CAPTURES = """
    hoard, on_capture = [], Plugin.on_capture
    def hoarding(self, key, batch, work):
        hoard.append(torch.zeros(100))
        return on_capture(self, key, batch, work)
    Plugin.on_capture = hoarding
"""

HOARDS_REPLAYS = """
    hoard = []
    def on_replay(self, key, batch):
        hoard.append(batch["lengths_B"].clone())
    Plugin.on_replay = on_replay
"""

FEATURES = "test_features_through_it_are_those_without_it"
REPLAY = "test_a_replay_gives_what_the_work_would_on_other_contents"
CAUGHT = {
    "is_no_plugin": (NO_SUBCLASS, REPLAY + "[decode]"),
    "names_a_phase": ("", "test_its_capabilities_name_phases_that_there_are"),
    "is_backwards": (BACKWARDS, FEATURES),
    "loses_a_key": (LOSES_A_KEY, REPLAY + "[prefill]"),
    "freezes_the_batch": (FREEZES_THE_BATCH, REPLAY + "[prefill]"),
    "works_twice": (WORKS_TWICE, "test_decoding_does_the_work_once"),
    "swallows_errors": (SWALLOWS_ERRORS, "test_an_error_of_the_work_comes_through[prefill]"),
    "clamps_the_batch": (CLAMPS_THE_BATCH, "test_it_changes_nothing_in_the_batch[decode]"),
    "moves_its_buffer": (
        MOVES_ITS_BUFFER,
        "test_its_buffers_stay_where_they_were_at_capture[prefill]",
    ),
    "counts_padding": (
        COUNTS_PADDING,
        "test_what_rows_of_padding_hold_does_not_reach_its_buffers[decode]",
    ),
    "waits": (WAITS, "test_a_replay_waits_for_no_device[prefill]"),
    "hoards_captures": (HOARDS_CAPTURES, "test_capturing_again_and_again_keeps_nothing[prefill]"),
    "hoards_replays": (HOARDS_REPLAYS, "test_replaying_again_and_again_keeps_nothing[decode]"),
    "is_right": ("", ""),
}


@pytest.fixture(scope="module")
def failures(
    wrong_folder: Path, run_suites: Callable[..., dict[str, set[str]]]
) -> dict[str, set[str]]:
    """Run every wrong plugin through its test and the right one through all of them."""
    for name, (wrong, _) in CAUGHT.items():
        capabilities = '"phase:training"' if name == "names_a_phase" else ""
        text = PLUGIN.replace("{wrong}", wrong).replace("{CAPABILITIES}", capabilities)
        (wrong_folder / f"{name}.py").write_text(text)
    return run_suites(
        {name: (SUITE.replace("{module}", name), test) for name, (_, test) in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name in CAUGHT if name != "is_right"])
def test_a_wrong_graph_plugin_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name][1] in failures[name]


def test_the_right_plugin_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()


def test_every_standard_test_has_caught_something() -> None:
    from draftcore.testing.graph_plugins import GraphPluginSuite

    standard = {name for name in vars(GraphPluginSuite) if name.startswith("test_")}
    caught = {test.partition("[")[0] for name, (_, test) in CAUGHT.items() if name != "is_right"}
    assert standard == caught
