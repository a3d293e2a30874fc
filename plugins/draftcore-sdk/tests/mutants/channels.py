"""Wrong channels of one process: the built-in `memory`, and what each does otherwise."""

from draftcore_sdk.channels import ChannelSuite

from mutants import Mutant, Mutants

RIGHT = """
from dataclasses import replace

from draftcore import hookimpl
from draftcore.channels import memory
from draftcore.errors import DraftcoreError
from draftcore.contracts.offers import Offer

class Channel(memory.MemoryChannel):
    pass

offer, claim, publish = Channel.offer, Channel.claim, Channel.publish
receive, advance, release = Channel.receive, Channel.advance, Channel._release
evict, tell, standing = Channel.evict, Channel._tell, Channel.standing

def without(check):
    # Publish in a world where the module's function `check` does nothing.
    loose = {**vars(memory), check: lambda *_: None}
    return type(publish)(publish.__code__, loose, closure=publish.__closure__)

@hookimpl
def describe():
    return [Offer("channel", "memory")]

@hookimpl
def channel(name, uri, run_id):
    return Channel.open(uri, run_id)
"""
CONFTEST = """
from draftcore_sdk import channel_ends

channel_ends.SOON = 2.0  # seconds; what a wrong channel owes never comes
"""

WRONG = {
    "hands_a_task_out_twice": Mutant(
        "test_tasks_are_handed_out_once_in_the_order_offered",
        """
        def twice(self, producer):
            self.last = claim(self, producer) if producer == "one" else getattr(self, "last", None)
            return self.last
        Channel.claim = twice
        """,
    ),
    "sorts_the_tasks": Mutant(
        "test_tasks_are_handed_out_once_in_the_order_offered",
        "Channel.offer = lambda self, tasks: offer(self, iter(sorted(tasks, key=lambda t: t.group.index)))",
    ),
    "takes_all_tasks": Mutant(
        "test_offered_tasks_are_consumed_lazily",
        "Channel.offer = lambda self, tasks: offer(self, list(tasks))",
    ),
    "sorts_the_refs": Mutant(
        "test_a_step_waits_for_all_its_samples_and_gets_them_in_plan_order",
        """
        def by_name(self, step):
            refs = receive(self, step)
            return refs and tuple(sorted(refs, key=lambda ref: ref.feature_id))
        Channel.receive = by_name
        """,
    ),
    "serves_half_a_step": Mutant(
        "test_a_step_waits_for_all_its_samples_and_gets_them_in_plan_order",
        """
        def half(self, step):
            refs = [self._ref(sample) for sample in step.samples]
            return receive(self, step) or tuple(ref for ref in refs if ref) or None
        Channel.receive = half
        """,
    ),
    "loses_a_ref": Mutant(
        "test_refs_come_back_as_they_were_published",
        """
        def lossy(self, step):
            refs = receive(self, step)
            return refs and refs[:-1]
        Channel.receive = lossy
        """,
    ),
    "loses_fields": Mutant(
        "test_refs_come_back_as_they_were_published",
        """
        def bare(self, step):
            refs = receive(self, step)
            return refs and tuple(replace(ref, tensors=()) for ref in refs)
        Channel.receive = bare
        """,
    ),
    "takes_any_members": Mutant(
        "test_other_samples_than_the_groups_are_refused[ac]",
        'Channel.publish = without("require_refs_of")',
    ),
    "takes_tensors": Mutant(
        "test_a_tensor_in_a_ref_is_refused_and_its_field_named",
        'Channel.publish = without("require_metadata")',
    ),
    "hides_failures": Mutant(
        "test_a_failed_task_raises_in_the_step_that_needs_it_only",
        """
        def patient(self, step):
            try:
                return receive(self, step)
            except DraftcoreError as error:
                if "behind" in str(error) or "closed" in str(error):
                    raise
        Channel.receive = patient
        """,
    ),
    "has_no_limits": Mutant(
        "test_credit_in_refs_limits_what_is_claimed",
        "Channel.open = classmethod(lambda cls, uri, run_id: cls(run_id))",
    ),
    "forgets_to_return_credit": Mutant(
        "test_an_advance_returns_credit",
        """
        def forgetful(self, group):
            used = self._used
            refs = release(self, group)
            self._used = used
            return refs
        Channel._release = forgetful
        """,
    ),
    "counts_claims_as_captured": Mutant(
        "test_the_trainer_sees_how_capture_stands",
        """
        standing = Channel.standing
        def hopeful(self):
            now = standing(self)
            return replace(now, captured=now.refs)
        Channel.standing = hopeful
        """,
    ),
    "keeps_the_credit_of_failures": Mutant(
        "test_a_failed_task_returns_its_credit",
        """
        def strict(self, task, refs):
            used = self._used
            publish(self, task, refs)
            self._used = used if isinstance(refs, Exception) else self._used
        Channel.publish = strict
        """,
    ),
    "refuses_a_waiting_step": Mutant(
        "test_a_waiting_step_is_served_whatever_the_credit[limit0]",
        """
        def stingy(self, producer):
            self._books.waiting = None
            return claim(self, producer)
        Channel.claim = stingy
        """,
    ),
    "releases_early": Mutant(
        "test_a_step_that_is_received_but_not_passed_keeps_its_refs",
        """
        def hasty(self, index):
            return advance(self, index + 1)
        Channel.advance = hasty
        """,
    ),
    "releases_half_a_group": Mutant(
        "test_a_group_is_released_whole_and_not_before_its_last_use",
        """
        def halves(self, index):
            used = {use.feature_id for at, step in self._books.steps.items() if at < index
                    for use in step.samples}
            refs = {ref for group in self._books.groups.values() for ref in group.refs}
            return advance(self, index) or tuple(ref for ref in refs if ref.feature_id in used)
        Channel.advance = halves
        """,
    ),
    "releases_twice": Mutant(
        "test_an_advance_returns_what_only_earlier_steps_used_and_returns_it_once",
        """
        def again(self, index):
            self.released = advance(self, index) or getattr(self, "released", ())
            return self.released
        Channel.advance = again
        """,
    ),
    "never_releases": Mutant(
        "test_an_advance_returns_what_only_earlier_steps_used_and_returns_it_once",
        """
        def hoarding(self, index):
            advance(self, index)
            return ()
        Channel.advance = hoarding
        """,
    ),
    "keeps_what_is_ahead": Mutant(
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
        "Channel.evict = lambda self, step, tasks: ()",
    ),
    "evicts_unasked": Mutant(
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
        """
        def eager(self, step, tasks):
            flying = {i for i, g in self._books.groups.items() if g.claim and g.outcome is None}
            self._books.full |= flying
            return evict(self, step, tasks)
        Channel.evict = eager
        """,
    ),
    "evicts_what_is_needed": Mutant(
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
        "Channel.evict = lambda self, step, tasks: evict(self, replace(step, samples=()), tasks)",
    ),
    "hands_out_what_is_ahead": Mutant(
        "test_only_what_a_waiting_step_lacks_is_handed_out_while_room_is_made",
        "Channel._may_go = lambda self, group: group.index not in self._books.leaving",
    ),
    "calls_nobody_off": Mutant(
        "test_who_waits_for_room_without_need_is_called_off", "Channel._is_wanted = lambda *_: True"
    ),
    "wakes_nobody": Mutant(
        "test_who_waits_for_room_is_woken_when_something_was_freed",
        """
        def quiet(self, step):
            self._books.freeing = False
            return receive(self, step)
        Channel.receive = quiet
        """,
    ),
    "heeds_old_words": Mutant(
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
        "Channel._tell = lambda self, task, tried: tell(self, task, self._books.round)",
    ),
    "gives_up_early": Mutant(
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
        """
        def impatient(self, step, tasks):
            self._books.emptied = True
            return evict(self, step, tasks)
        Channel.evict = impatient
        """,
    ),
    "never_gives_up": Mutant(
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
        """
        def stubborn(self, step, tasks):
            self._books.emptied = False
            return evict(self, step, tasks)
        Channel.evict = stubborn
        """,
    ),
    "gives_up_whole_groups": Mutant(
        "test_what_is_rejected_to_the_last_attempt_is_given_up_and_no_other_sample",
        """
        def spoil(self, group, ref, reason):
            group.outcome = None
            self._fail(group, DraftcoreError(reason))
        Channel._spoil = spoil
        """,
    ),
    "complains_early": Mutant(
        "test_a_failure_that_the_step_is_to_hear_of_is_no_reason_to_complain",
        """
        def strict(self):
            waiting, held = self._books.waiting, self._books.group_of
            samples = waiting.samples if waiting else ()
            return [s for s in samples if s.feature_id not in held or held[s.feature_id].failed]
        Channel._missing = strict
        """,
    ),
    "stays_open": Mutant(
        "test_a_closed_channel_says_so", "Channel.close = lambda self, *outcome: None"
    ),
}

CHANNELS = Mutants(
    ChannelSuite, {"{name}.py": RIGHT, "conftest.py": CONFTEST}, WRONG, every_test=False
)
