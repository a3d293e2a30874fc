"""The channel suite catches channels that are wrong, each by the test that names the fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testing.conftest import RunSuites

PLUGIN = """
from draftcore import hookimpl
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("channel", "memory")]

@hookimpl
def channel(name, uri, run_id):
    from dataclasses import replace
    from draftcore.channels import memory
    from draftcore.errors import DraftcoreError
    from draftcore.channels import Credit

    class Channel(memory.MemoryChannel):
        pass

    offer, claim, publish = Channel.offer, Channel.claim, Channel.publish
    receive, advance, release = Channel.receive, Channel.advance, Channel._release
    evict, tell = Channel.evict, Channel._tell

    def without(check):
        # Publish in a world where the module's function `check` does nothing.
        loose = {**vars(memory), check: lambda *_: None}
        return type(publish)(publish.__code__, loose, closure=publish.__closure__)

{wrong}
    return Channel.open(uri, run_id)
"""

SUITE = """
from draftcore.testing import channel_ends

channel_ends.SOON = 2.0  # seconds; what a wrong channel owes never comes
from draftcore.testing import channels

class TestSuite(channels.ChannelSuite):
    plugin = "{module}"
"""

HANDS_OUT_TWICE = """
    def twice(self, producer):
        self.last = claim(self, producer) if producer == "one" else getattr(self, "last", None)
        return self.last
    Channel.claim = twice
"""

WRONG_ORDER = """
    Channel.offer = lambda self, tasks: offer(self, iter(sorted(tasks, key=lambda t: t.group.index)))
"""

TAKES_ALL_TASKS = """
    Channel.offer = lambda self, tasks: offer(self, list(tasks))
"""

ORDER_OF_PUBLICATION = """
    def by_name(self, step):
        refs = receive(self, step)
        return refs and tuple(sorted(refs, key=lambda ref: ref.feature_id))
    Channel.receive = by_name
"""

SERVES_HALF_A_STEP = """
    def half(self, step):
        refs = [self._ref(sample) for sample in step.samples]
        return receive(self, step) or tuple(ref for ref in refs if ref) or None
    Channel.receive = half
"""

LOSES_A_REF = """
    def lossy(self, step):
        refs = receive(self, step)
        return refs and refs[:-1]
    Channel.receive = lossy
"""

LOSES_FIELDS = """
    def bare(self, step):
        refs = receive(self, step)
        return refs and tuple(replace(ref, tensors=()) for ref in refs)
    Channel.receive = bare
"""

TAKES_ANY_MEMBERS = """
    Channel.publish = without("require_refs_of")
"""

TAKES_TENSORS = """
    Channel.publish = without("require_metadata")
"""

HIDES_FAILURES = """
    def patient(self, step):
        try:
            return receive(self, step)
        except DraftcoreError as error:
            if "behind" in str(error) or "closed" in str(error):
                raise
    Channel.receive = patient
"""

NO_CREDIT_IN_REFS = """
    Channel.open = classmethod(lambda cls, uri, run_id: cls(run_id))
"""

COUNTS_CLAIMS_AS_CAPTURED = """
    standing = Channel.standing
    def hopeful(self):
        now = standing(self)
        return replace(now, captured=now.refs)
    Channel.standing = hopeful
"""

FORGETS_CREDIT = """
    def forgetful(self, group):
        used = self._used
        refs = release(self, group)
        self._used = used
        return refs
    Channel._release = forgetful
"""

FAILURES_KEEP_CREDIT = """
    def strict(self, task, refs):
        used = self._used
        publish(self, task, refs)
        self._used = used if isinstance(refs, Exception) else self._used
    Channel.publish = strict
"""

REFUSES_NEED = """
    def stingy(self, producer):
        self._books.waiting = None
        return claim(self, producer)
    Channel.claim = stingy
"""

RELEASES_EARLY = """
    def hasty(self, index):
        return advance(self, index + 1)
    Channel.advance = hasty
"""

RELEASES_MEMBERS = """
    def halves(self, index):
        used = {use.feature_id for at, step in self._books.steps.items() if at < index
                for use in step.samples}
        refs = {ref for group in self._books.groups.values() for ref in group.refs}
        return advance(self, index) or tuple(ref for ref in refs if ref.feature_id in used)
    Channel.advance = halves
"""

RELEASES_TWICE = """
    def again(self, index):
        self.released = advance(self, index) or getattr(self, "released", ())
        return self.released
    Channel.advance = again
"""

NEVER_RELEASES = """
    def hoarding(self, index):
        advance(self, index)
        return ()
    Channel.advance = hoarding
"""

KEEPS_WHAT_IS_AHEAD = """
    Channel.evict = lambda self, step, tasks: ()
"""

EVICTS_UNASKED = """
    def eager(self, step, tasks):
        flying = {i for i, g in self._books.groups.items() if g.claim and g.outcome is None}
        self._books.full |= flying
        return evict(self, step, tasks)
    Channel.evict = eager
"""

EVICTS_WHAT_IS_NEEDED = """
    Channel.evict = lambda self, step, tasks: evict(self, replace(step, samples=()), tasks)
"""

HANDS_OUT_WHAT_IS_AHEAD = """
    Channel._may_go = lambda self, group: group.index not in self._books.leaving
"""

CALLS_NOBODY_OFF = """
    Channel._is_wanted = lambda *_: True
"""

WAKES_NOBODY = """
    def quiet(self, step):
        self._books.freeing = False
        return receive(self, step)
    Channel.receive = quiet
"""

HEEDS_OLD_WORDS = """
    Channel._tell = lambda self, task, tried: tell(self, task, self._books.round)
"""

GIVES_UP_EARLY = """
    def impatient(self, step, tasks):
        self._books.emptied = True
        return evict(self, step, tasks)
    Channel.evict = impatient
"""

NEVER_GIVES_UP = """
    def stubborn(self, step, tasks):
        self._books.emptied = False
        return evict(self, step, tasks)
    Channel.evict = stubborn
"""

GIVES_UP_WHOLE_GROUPS = """
    def spoil(self, group, ref, reason):
        group.outcome = None
        self._fail(group, DraftcoreError(reason))
    Channel._spoil = spoil
"""

COMPLAINS_EARLY = """
    def strict(self):
        waiting, held = self._books.waiting, self._books.group_of
        samples = waiting.samples if waiting else ()
        return [s for s in samples if s.feature_id not in held or held[s.feature_id].failed]
    Channel._missing = strict
"""

STAYS_OPEN = """
    Channel.close = lambda self: None
"""

CAUGHT = {
    "hands_a_task_out_twice": (
        HANDS_OUT_TWICE,
        "test_tasks_are_handed_out_once_in_the_order_offered",
    ),
    "sorts_the_tasks": (WRONG_ORDER, "test_tasks_are_handed_out_once_in_the_order_offered"),
    "takes_all_tasks": (TAKES_ALL_TASKS, "test_offered_tasks_are_consumed_lazily"),
    "sorts_the_refs": (
        ORDER_OF_PUBLICATION,
        "test_a_step_waits_for_all_its_samples_and_gets_them_in_plan_order",
    ),
    "serves_half_a_step": (
        SERVES_HALF_A_STEP,
        "test_a_step_waits_for_all_its_samples_and_gets_them_in_plan_order",
    ),
    "loses_a_ref": (LOSES_A_REF, "test_refs_come_back_as_they_were_published"),
    "loses_fields": (LOSES_FIELDS, "test_refs_come_back_as_they_were_published"),
    "takes_any_members": (
        TAKES_ANY_MEMBERS,
        "test_other_samples_than_the_groups_are_refused[ac]",
    ),
    "takes_tensors": (TAKES_TENSORS, "test_a_tensor_in_a_ref_is_refused_and_its_field_named"),
    "hides_failures": (
        HIDES_FAILURES,
        "test_a_failed_task_raises_in_the_step_that_needs_it_only",
    ),
    "has_no_limits": (NO_CREDIT_IN_REFS, "test_credit_in_refs_limits_what_is_claimed"),
    "forgets_to_return_credit": (FORGETS_CREDIT, "test_an_advance_returns_credit"),
    "counts_claims_as_captured": (
        COUNTS_CLAIMS_AS_CAPTURED,
        "test_the_trainer_sees_how_capture_stands",
    ),
    "keeps_the_credit_of_failures": (
        FAILURES_KEEP_CREDIT,
        "test_a_failed_task_returns_its_credit",
    ),
    "refuses_a_waiting_step": (
        REFUSES_NEED,
        "test_a_waiting_step_is_served_whatever_the_credit[limit0]",
    ),
    "releases_early": (
        RELEASES_EARLY,
        "test_a_step_that_is_received_but_not_passed_keeps_its_refs",
    ),
    "releases_half_a_group": (
        RELEASES_MEMBERS,
        "test_a_group_is_released_whole_and_not_before_its_last_use",
    ),
    "releases_twice": (
        RELEASES_TWICE,
        "test_an_advance_returns_what_only_earlier_steps_used_and_returns_it_once",
    ),
    "never_releases": (
        NEVER_RELEASES,
        "test_an_advance_returns_what_only_earlier_steps_used_and_returns_it_once",
    ),
    "keeps_what_is_ahead": (
        KEEPS_WHAT_IS_AHEAD,
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
    ),
    "evicts_unasked": (
        EVICTS_UNASKED,
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
    ),
    "evicts_what_is_needed": (
        EVICTS_WHAT_IS_NEEDED,
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
    ),
    "hands_out_what_is_ahead": (
        HANDS_OUT_WHAT_IS_AHEAD,
        "test_only_what_a_waiting_step_lacks_is_handed_out_while_room_is_made",
    ),
    "calls_nobody_off": (
        CALLS_NOBODY_OFF,
        "test_who_waits_for_room_without_need_is_called_off",
    ),
    "wakes_nobody": (
        WAKES_NOBODY,
        "test_who_waits_for_room_is_woken_when_something_was_freed",
    ),
    "heeds_old_words": (
        HEEDS_OLD_WORDS,
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
    ),
    "gives_up_early": (
        GIVES_UP_EARLY,
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
    ),
    "never_gives_up": (
        NEVER_GIVES_UP,
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
    ),
    "gives_up_whole_groups": (
        GIVES_UP_WHOLE_GROUPS,
        "test_what_is_rejected_to_the_last_attempt_is_given_up_and_no_other_sample",
    ),
    "complains_early": (
        COMPLAINS_EARLY,
        "test_a_failure_that_the_step_is_to_hear_of_is_no_reason_to_complain",
    ),
    "stays_open": (STAYS_OPEN, "test_a_closed_channel_says_so"),
    "is_right": ("", ""),
}


@pytest.fixture(scope="module")
def failures(wrong_folder: Path, run_suites: RunSuites) -> dict[str, set[str]]:
    for name, (wrong, _) in CAUGHT.items():
        (wrong_folder / f"{name}.py").write_text(PLUGIN.replace("{wrong}", wrong))
    return run_suites(
        {name: (SUITE.replace("{module}", name), test) for name, (_, test) in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name, (wrong, _) in CAUGHT.items() if wrong])
def test_a_wrong_channel_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name][1] in failures[name]


def test_the_right_channel_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()
