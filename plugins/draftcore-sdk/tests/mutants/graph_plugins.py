"""Wrong graph plugins: one that counts tokens, and what each does otherwise."""

from draftcore_sdk.graph_plugins import GraphPluginSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import torch

from draftcore_graphs.graph_plugin import GraphPlugin

CAPABILITIES = frozenset()

class Right(GraphPlugin):
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

class Plugin(Right):
    pass

== Offer("graph-plugin", "{name}", CAPABILITIES)
== graph_plugin(name): Plugin()
"""

WRONG = """
== names_a_phase: test_its_capabilities_name_phases_that_there_are
CAPABILITIES = frozenset({"phase:training"})
== is_backwards: test_features_through_it_are_those_without_it
Plugin.joined(rows): return {name: torch.cat([row[name] for row in rows[::-1]]) for name in rows[0]}
== loses_a_key: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
Plugin.joined(rows):
    found = super().joined(rows)
    some = isinstance(found, dict) and "found" in found
    return {"found": found["found"]} if some else found
== freezes_the_batch: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
Plugin.on_capture(key, batch, work):
    copies = {name: value.clone() for name, value in batch.items()}
    return lambda batch: work(copies)
== works_twice: test_decoding_does_the_work_once
Plugin.on_capture(key, batch, work): return lambda batch: (work(batch), work(batch))[1]
== swallows_errors: test_an_error_of_the_work_comes_through[prefill]
Plugin.on_capture(key, batch, work):
    def careful(batch):
        try:
            return work(batch)
        except LookupError:
            return None
    return careful
== clamps_the_batch: test_it_changes_nothing_in_the_batch[decode]
Plugin.on_replay(key, batch):
    batch["lengths_B"].clamp_(max=1)
    super().on_replay(key, batch)
== moves_its_buffer: test_its_buffers_stay_where_they_were_at_capture[prefill]
Plugin.on_replay(key, batch): self.count_1 = (batch["lengths_B"] * batch["live_B"]).sum()
== counts_padding: test_what_rows_of_padding_hold_does_not_reach_its_buffers[decode]
Plugin.on_replay(key, batch): self.count_1.copy_(batch["lengths_B"].sum())
== waits: test_a_replay_waits_for_no_device[prefill]
Plugin.on_replay(key, batch): self.count_1.fill_(int((batch["lengths_B"] * batch["live_B"]).sum()))
== hoards_captures: test_capturing_again_and_again_keeps_nothing[prefill]
HOARD = []
Plugin.on_capture(key, batch, work):
    HOARD.append(torch.zeros(100))
    return super().on_capture(key, batch, work)
== hoards_replays: test_replaying_again_and_again_keeps_nothing[decode]
HOARD = []
Plugin.on_replay(key, batch): HOARD.append(batch["lengths_B"].clone())
== drops_the_last_of_odd_rows: test_features_through_it_are_those_without_it
Plugin.on_capture(key, batch, work):
    if "tokens_BT" not in batch or key.rows < 2:
        return work
    def halves(batch):
        half = key.rows // 2
        part = lambda a, b: work({n: v[a:b] for n, v in batch.items()})
        return self.joined([part(0, half), part(half, 2 * half)])
    return halves
== runs_the_work_to_look_at_it: test_it_changes_nothing_in_the_batch[decode]
Plugin.on_capture(key, batch, work):
    self.shapes = work(batch)
    return work
== asks_for_lengths_in_its_work: test_decoding_does_the_work_once
Plugin.on_capture(key, batch, work):
    def cut(batch):
        longest = int(batch["lengths_B"].max())
        return work(batch)
    return cut
"""

MUTANTS = Mutants(GraphPluginSuite, one_file(RIGHT), wrong(WRONG))
