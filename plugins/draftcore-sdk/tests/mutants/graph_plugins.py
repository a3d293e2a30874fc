"""Wrong graph plugins: one that counts tokens, and what each does otherwise."""

from draftcore_sdk.graph_plugins import GraphPluginSuite

from mutants import Mutants, wrong

RIGHT = """
import torch

from draftcore import hookimpl
from draftcore_graphs.graph_plugin import GraphPlugin
from draftcore.contracts.offers import Offer

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

@hookimpl
def describe():
    return [Offer("graph-plugin", "mine", CAPABILITIES)]

@hookimpl
def graph_plugin(name):
    return Plugin()
"""

WRONG = """
== names_a_phase: test_its_capabilities_name_phases_that_there_are
CAPABILITIES = frozenset({"phase:training"})
== is_backwards: test_features_through_it_are_those_without_it
class Plugin(Right):
    def joined(self, rows):
        return {name: torch.cat([row[name] for row in rows[::-1]]) for name in rows[0]}
== loses_a_key: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
class Plugin(Right):
    def joined(self, rows):
        found = super().joined(rows)
        some = isinstance(found, dict) and "found" in found
        return {"found": found["found"]} if some else found
== freezes_the_batch: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
class Plugin(Right):
    def on_capture(self, key, batch, work):
        copies = {name: value.clone() for name, value in batch.items()}
        return lambda batch: work(copies)
== works_twice: test_decoding_does_the_work_once
class Plugin(Right):
    def on_capture(self, key, batch, work):
        return lambda batch: (work(batch), work(batch))[1]
== swallows_errors: test_an_error_of_the_work_comes_through[prefill]
class Plugin(Right):
    def on_capture(self, key, batch, work):
        def careful(batch):
            try:
                return work(batch)
            except LookupError:
                return None
        return careful
== clamps_the_batch: test_it_changes_nothing_in_the_batch[decode]
class Plugin(Right):
    def on_replay(self, key, batch):
        batch["lengths_B"].clamp_(max=1)
        super().on_replay(key, batch)
== moves_its_buffer: test_its_buffers_stay_where_they_were_at_capture[prefill]
class Plugin(Right):
    def on_replay(self, key, batch):
        self.count_1 = (batch["lengths_B"] * batch["live_B"]).sum()
== counts_padding: test_what_rows_of_padding_hold_does_not_reach_its_buffers[decode]
class Plugin(Right):
    def on_replay(self, key, batch):
        self.count_1.copy_(batch["lengths_B"].sum())
== waits: test_a_replay_waits_for_no_device[prefill]
class Plugin(Right):
    def on_replay(self, key, batch):
        self.count_1.fill_(int((batch["lengths_B"] * batch["live_B"]).sum()))
== hoards_captures: test_capturing_again_and_again_keeps_nothing[prefill]
HOARD = []

class Plugin(Right):
    def on_capture(self, key, batch, work):
        HOARD.append(torch.zeros(100))
        return super().on_capture(key, batch, work)
== hoards_replays: test_replaying_again_and_again_keeps_nothing[decode]
HOARD = []

class Plugin(Right):
    def on_replay(self, key, batch):
        HOARD.append(batch["lengths_B"].clone())
== changes_the_batch_in_its_work: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
class Plugin(Right):
    def on_capture(self, key, batch, work):
        def zeroing(batch):
            found = work(batch)
            if "tokens_BT" in batch:
                batch["tokens_BT"].zero_()
            return found
        return zeroing
== drops_the_last_of_odd_rows: test_features_through_it_are_those_without_it
class Plugin(Right):
    def on_capture(self, key, batch, work):
        if "tokens_BT" not in batch or key.rows < 2:
            return work
        def halves(batch):
            half = key.rows // 2
            part = lambda a, b: work({n: v[a:b] for n, v in batch.items()})
            return self.joined([part(0, half), part(half, 2 * half)])
        return halves
== divides_tokens_where_it_likes: test_features_through_it_are_those_without_it
class Plugin(Right):
    # Each half of the tokens as if the other was not there.
    def on_capture(self, key, batch, work):
        if "tokens_BT" not in batch or key.length < 2:
            return work
        def halves(batch):
            half = key.length // 2
            parts = batch["tokens_BT"][:, :half], batch["tokens_BT"][:, half:]
            found = [work({**batch, "tokens_BT": part}) for part in parts]
            return beside(found)
        return halves

def beside(found):
    first = found[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(found, 1)
    if isinstance(first, dict):
        return {name: beside([one[name] for one in found]) for name in first}
    return tuple(map(list, zip(*found))) and tuple(
        None if part[0] is None else beside(list(part)) for part in zip(*found)
    )

== runs_the_work_to_look_at_it: test_it_changes_nothing_in_the_batch[decode]
class Plugin(Right):
    def on_capture(self, key, batch, work):
        self.shapes = work(batch)
        return work
== doubles_the_type: test_a_replay_gives_what_the_work_would_on_other_contents[prefill]
class Plugin(Right):
    def joined(self, rows):
        found = super().joined(rows)
        return found.double() if isinstance(found, torch.Tensor) and found.ndim == 2 else found
== wraps_errors: test_an_error_of_the_work_comes_through[decode]
class Plugin(Right):
    def on_capture(self, key, batch, work):
        def careful(batch):
            try:
                return work(batch)
            except Exception as error:
                raise RuntimeError("work failed") from error
        return careful
== reads_the_first_batch: test_features_through_it_are_those_without_it
class Plugin(Right):
    first = None
    def on_capture(self, key, batch, work):
        self.first = self.first or batch
        first = self.first
        return (lambda batch: work(first)) if len(first["lengths_B"]) == key.rows else work
== asks_for_lengths_in_its_work: test_decoding_does_the_work_once
class Plugin(Right):
    def on_capture(self, key, batch, work):
        def cut(batch):
            longest = int(batch["lengths_B"].max())
            return work(batch)
        return cut
== counts_rows_of_the_bucket: test_what_rows_of_padding_hold_does_not_reach_its_buffers[prefill]
class Plugin(Right):
    def on_replay(self, key, batch):
        self.count_1.fill_(0)
        for name, value in batch.items():
            if name != "live_B":
                self.count_1.add_(value.sum())
== keeps_the_batches_it_saw: test_replaying_again_and_again_keeps_nothing[prefill]
class Plugin(Right):
    def on_replay(self, key, batch):
        self.seen = [*getattr(self, "seen", []), {n: v.clone() for n, v in batch.items()}][-5000:]
== works_after_the_graph: test_features_through_it_are_those_without_it
class Plugin(Right):
    # Computes once at capture what every replay returns.
    def on_capture(self, key, batch, work):
        found = []
        def once(batch):
            if not found:
                found.append(work(batch))
            return found[0]
        return once if "tokens_BT" in batch else work
== marks_padding_dead: test_it_changes_nothing_in_the_batch[prefill]
class Plugin(Right):
    def on_replay(self, key, batch):
        batch["live_B"].logical_and_(batch["lengths_B"] > 0)
        batch["tokens_BT" if "tokens_BT" in batch else "last_B"].clamp_(min=1)
        super().on_replay(key, batch)
"""

MUTANTS = Mutants(GraphPluginSuite, {"{name}.py": RIGHT}, wrong(WRONG))
