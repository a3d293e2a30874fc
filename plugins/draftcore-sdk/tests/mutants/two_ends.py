"""Wrong channels between processes: the built-in `sqlite`, and what each does otherwise."""

from draftcore_sdk.channels import ChannelSuite

from mutants import Mutant, Mutants

RIGHT = """
import dataclasses

from draftcore import hookimpl
from draftcore.channels import logged
from draftcore.channels import memory
from draftcore.channels import opening
from draftcore.channels import producer_end
from draftcore.channels import trainer_end
from draftcore.channels.sqlite import SqliteLog
from draftcore.contracts.offers import Offer

Trainer, Producer = trainer_end.TrainerEnd, producer_end.ProducerEnd
Base = logged.LoggedChannel
Books = memory.MemoryChannel

@hookimpl
def describe():
    return [Offer("channel", "sqlite", frozenset({"shared"}))]

@hookimpl
def channel(name, uri, run_id, role):
    return SqliteLog.open(uri, run_id, role)
"""
CONFTEST = """
from draftcore_sdk import channel_ends

channel_ends.SOON = 4.0  # seconds; what a wrong channel owes never comes
"""
BODY = """
    plugin = "{name}"

    def garble(self, uri, bodies):
        import sqlite3
        from contextlib import closing

        with closing(sqlite3.connect(uri.removeprefix("sqlite:"))) as connection, connection:
            to = connection.execute("SELECT json_extract(body, '$.session') FROM head").fetchone()
            rows = [(*to, body) for body in bodies]
            insert = "INSERT INTO letters (recipient, writer, body) VALUES (?, 'vandal', ?)"
            connection.executemany(insert, rows)
"""

WRONG = {
    "never_declares_dead": Mutant(
        "test_a_dead_producers_claims_return", "Trainer._dead = lambda *_: False"
    ),
    "serves_late_publications": Mutant(
        "test_a_frozen_producer_is_replaced_and_may_wake_up",
        """
        publish = Books.publish
        def trusting(self, task, refs):
            group = self._books.groups.get(task.group.index)
            publish(self, dataclasses.replace(task, claim=group.claim) if group else task, refs)
        Books.publish = trusting
        """,
    ),
    "leaks_late_publications": Mutant(
        "test_a_second_publication_is_ignored_and_its_refs_come_back",
        "Books._keep_stale = lambda *_: None",
    ),
    "hands_out_while_freeing": Mutant(
        "test_a_group_is_not_handed_out_while_its_old_refs_are_being_freed",
        """
        claim = Books._claim
        def hasty(self, producer):
            self._books.leaving = set()
            return claim(self, producer)
        Books._claim = hasty
        """,
    ),
    "never_trims": Mutant(
        "test_a_long_run_does_not_grow_the_log", "SqliteLog.trim = lambda self: None"
    ),
    "takes_any_run": Mutant(
        "test_another_runs_channel_is_refused_naming_both[trainer]",
        "Base._head = lambda self: logged.Head.of(self._log)",
    ),
    "takes_finished_runs": Mutant(
        "test_a_finished_runs_channel_is_refused_and_a_failed_ones_is_not[trainer]",
        "Base._require_unfinished = lambda *_: None",
    ),
    "ends_in_silence": Mutant(
        "test_a_waiting_producer_returns_within_a_second_of_the_trainers_end[finished]",
        """
        tell = Trainer._set_head
        Trainer._set_head = lambda self, state: tell(self, "running")
        """,
    ),
    "waits_forever": Mutant(
        "test_a_side_that_hears_nothing_of_the_other_gives_up",
        """
        of = logged.Settings.of
        logged.Settings.of = lambda uri: dataclasses.replace(of(uri), patience=1e9)
        """,
    ),
    "takes_any_name": Mutant(
        "test_a_name_that_is_no_plain_name_is_refused[../up]",
        "opening.require_name = producer_end.require_name = lambda kind, name: name",
    ),
    "leaves_in_silence": Mutant(
        "test_a_producer_that_leaves_returns_its_claims_at_once",
        """
        append = SqliteLog.append
        def quiet(self, letters):
            append(self, [letter for letter in letters if letter[1].get("kind") != "left"])
        SqliteLog.append = quiet
        """,
    ),
    "asks_the_same_again": Mutant(
        "test_a_failed_group_goes_to_another_producer_and_is_given_up_in_the_end",
        "Books._returned_for = lambda self, producer: self._books.returned.pop(0)",
    ),
    "gives_up_at_once": Mutant(
        "test_a_failed_group_goes_to_another_producer_and_is_given_up_in_the_end",
        """
        start = Books.__init__
        Books.__init__ = lambda self, run_id, **options: start(self, run_id, **{**options, "attempts": 1})
        """,
    ),
    "drops_requests": Mutant(
        "test_a_waiting_claim_is_answered_when_credit_returns",
        """
        answers = Trainer._answers
        def once(self):
            found = answers(self)
            for (producer, claimant), request in self._pending.items():
                self._peers[producer].answered[claimant] = request
            self._pending.clear()
            return found
        Trainer._answers = once
        """,
    ),
    "stays_when_replaced": Mutant(
        "test_a_new_trainer_voids_old_claims_and_producers_go_on",
        "Trainer._require_own_session = lambda self: None",
    ),
    "keeps_the_old_session": Mutant(
        "test_a_new_trainer_voids_old_claims_and_producers_go_on",
        """
        look = Producer._look
        Producer._look = lambda self, now: None if self._session else look(self, now)
        """,
    ),
    "breaks_on_rubbish": Mutant(
        "test_malformed_records_are_skipped_and_reported",
        """
        def trusting(self, letters, now):
            for writer, record in letters:
                self._hear(writer, record, now)
        Base._take = trusting
        """,
    ),
    "opens_as_both": Mutant(
        "test_a_shared_channel_is_not_opened_as_both_ends",
        """
        @hookimpl
        def channel(name, uri, run_id, role):
            return SqliteLog.open(uri, run_id, "trainer" if role == "both" else role)
        """,
    ),
    "serves_the_other_end": Mutant(
        "test_each_end_refuses_what_is_the_others",
        "Trainer.claim = lambda self, producer, wait=0.0: None",
    ),
    "says_nothing_of_full_stores": Mutant(
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
        """
        append = SqliteLog.append
        def proud(self, letters):
            append(self, [letter for letter in letters if letter[1].get("kind") != "full"])
        SqliteLog.append = proud
        """,
    ),
    "calls_nobody_off": Mutant(
        "test_who_waits_for_room_without_need_is_called_off",
        """
        room = Trainer._room
        def some(self):
            return [letter for letter in room(self) if (letter[1]["round"] is None) is False]
        Trainer._room = some
        """,
    ),
    "wakes_nobody": Mutant(
        "test_who_waits_for_room_is_woken_when_something_was_freed",
        """
        room = Trainer._room
        def some(self):
            return [letter for letter in room(self) if (letter[1]["round"] is None) is True]
        Trainer._room = some
        """,
    ),
    "heeds_old_words": Mutant(
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
        """
        wait_for_room = Producer.wait_for_room
        def hasty(self, task, wait):
            if task.claim in self._tried:
                self._tried[task.claim] = self._round
            return wait_for_room(self, task, wait)
        Producer.wait_for_room = hasty
        """,
    ),
    "keeps_old_claims": Mutant(
        "test_who_waits_for_room_hears_that_a_new_trainer_wants_no_old_claim",
        """
        class Kept(dict):
            clear = lambda self: None
        start = Producer.__init__
        def clinging(self, *arguments):
            start(self, *arguments)
            self._tried = Kept()
        Producer.__init__ = clinging
        """,
    ),
    "sleeps_through_the_end": Mutant(
        "test_who_waits_for_room_hears_of_the_runs_end",
        "Producer._has_room = lambda self, task, tried: False",
    ),
    "repeats_a_step": Mutant(
        "test_every_sample_is_received_once_whatever_is_killed",
        """
        offer = Trainer.offer
        def again(self, tasks):
            offer(self, tasks)
            self._last = None
        def receive(self, step, ask=Trainer.receive):
            refs = ask(self, step)
            if refs is not None and step.index % 7 == 3:
                return self._last
            self._last = refs or self._last
            return refs
        Trainer.offer, Trainer.receive = again, receive
        """,
    ),
}

# `tests/channels/test_sqlite_channel.py` runs the right one through the whole suite.
TWO_ENDS = Mutants(
    ChannelSuite,
    {"{name}.py": RIGHT, "conftest.py": CONFTEST},
    WRONG,
    BODY,
    every_test=False,
    apart=True,
    right_runs="test_a_dead_producers_claims_return",
)
