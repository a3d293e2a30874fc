"""The suite of channels catches those between processes that are wrong, each by the right test."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from draftcore.testing import child_environment

PLUGIN = """
import dataclasses
from draftcore import hookimpl
from draftcore.channels import logged, memory, opening, producer_end, trainer_end
from draftcore.channels.sqlite import SqliteLog
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("channel", "sqlite", frozenset({"shared"}))]

@hookimpl
def channel(name, uri, run_id, role):
    return SqliteLog.open(uri, run_id, role)

Trainer, Producer = trainer_end.TrainerEnd, producer_end.ProducerEnd
Base = logged.LoggedChannel
Books = memory.MemoryChannel
"""

SUITE = """
import sqlite3
from contextlib import closing
from draftcore.testing import channel_ends

channel_ends.SOON = 4.0  # seconds; what a wrong channel owes never comes
from draftcore.testing import channels

class TestSuite(channels.ChannelSuite):
    plugin = "{module}"

    def garble(self, uri, bodies):
        with closing(sqlite3.connect(uri.removeprefix("sqlite:"))) as connection, connection:
            to = connection.execute("SELECT json_extract(body, '$.session') FROM head").fetchone()
            rows = [(*to, body) for body in bodies]
            insert = "INSERT INTO letters (recipient, writer, body) VALUES (?, 'vandal', ?)"
            connection.executemany(insert, rows)
"""

NEVER_DEAD = "Trainer._dead = lambda *_: False"

TRUSTS_LATE_ONES = """
publish = Books.publish
def trusting(self, task, refs):
    group = self._books.groups.get(task.group.index)
    publish(self, dataclasses.replace(task, claim=group.claim) if group else task, refs)
Books.publish = trusting
"""

FORGETS_LATE_ONES = "Books._keep_stale = lambda *_: None"

HANDS_OUT_WHILE_FREEING = """
claim = Books._claim
def hasty(self, producer):
    self._books.leaving = set()
    return claim(self, producer)
Books._claim = hasty
"""

NEVER_TRIMS = "SqliteLog.trim = lambda self: None"

ANY_RUN = "Base._head = lambda self: logged.Head.of(self._log)"

FINISHED_TOO = "Base._require_unfinished = lambda *_: None"

ENDS_IN_SILENCE = """
tell = Trainer._set_head
Trainer._set_head = lambda self, state: tell(self, "running")
"""

ENDLESS_PATIENCE = """
of = logged.Settings.of
logged.Settings.of = lambda uri: dataclasses.replace(of(uri), patience=1e9)
"""

ANY_NAME = """
opening.require_name = producer_end.require_name = lambda kind, name: name
"""

LEAVES_IN_SILENCE = """
append = SqliteLog.append
def quiet(self, letters):
    append(self, [letter for letter in letters if letter[1].get("kind") != "left"])
SqliteLog.append = quiet
"""

SAME_PRODUCER_AGAIN = "Books._returned_for = lambda self, producer: self._books.returned.pop(0)"

ONE_ATTEMPT = """
start = Books.__init__
Books.__init__ = lambda self, run_id, **options: start(self, run_id, **{**options, "attempts": 1})
"""

DROPS_REQUESTS = """
answers = Trainer._answers
def once(self):
    found = answers(self)
    for (producer, claimant), request in self._pending.items():
        self._peers[producer].answered[claimant] = request
    self._pending.clear()
    return found
Trainer._answers = once
"""

STAYS_WHEN_REPLACED = "Trainer._require_own_session = lambda self: None"

KEEPS_THE_OLD_SESSION = """
look = Producer._look
Producer._look = lambda self, now: None if self._session else look(self, now)
"""

BREAKS_ON_RUBBISH = """
def trusting(self, letters, now):
    for writer, record in letters:
        self._hear(writer, record, now)
Base._take = trusting
"""

OFFERS_BOTH_ROLES = """
@hookimpl
def channel(name, uri, run_id, role):
    return SqliteLog.open(uri, run_id, "trainer" if role == "both" else role)
"""

SERVES_THE_OTHER_END = "Trainer.claim = lambda self, producer, wait=0.0: None"

SAYS_NOTHING_OF_FULL_STORES = """
append = SqliteLog.append
def proud(self, letters):
    append(self, [letter for letter in letters if letter[1].get("kind") != "full"])
SqliteLog.append = proud
"""

ANSWERS_ABOUT_ROOM = """
room = Trainer._room
def some(self):
    return [letter for letter in room(self) if (letter[1]["round"] is None) is {called_off}]
Trainer._room = some
"""

HEEDS_OLD_WORDS = """
wait_for_room = Producer.wait_for_room
def hasty(self, task, wait):
    if task.claim in self._tried:
        self._tried[task.claim] = self._round
    return wait_for_room(self, task, wait)
Producer.wait_for_room = hasty
"""

KEEPS_OLD_CLAIMS = """
class Kept(dict):
    clear = lambda self: None
start = Producer.__init__
def clinging(self, *arguments):
    start(self, *arguments)
    self._tried = Kept()
Producer.__init__ = clinging
"""

SLEEPS_THROUGH_THE_END = "Producer._has_room = lambda self, task, tried: False"

REPEATS_A_STEP = """
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
"""

CAUGHT = {
    "never_declares_dead": (NEVER_DEAD, "test_a_dead_producers_claims_return"),
    "serves_late_publications": (
        TRUSTS_LATE_ONES,
        "test_a_frozen_producer_is_replaced_and_may_wake_up",
    ),
    "leaks_late_publications": (
        FORGETS_LATE_ONES,
        "test_a_second_publication_is_ignored_and_its_refs_come_back",
    ),
    "hands_out_while_freeing": (
        HANDS_OUT_WHILE_FREEING,
        "test_a_group_is_not_handed_out_while_its_old_refs_are_being_freed",
    ),
    "never_trims": (NEVER_TRIMS, "test_a_long_run_does_not_grow_the_log"),
    "takes_any_run": (ANY_RUN, "test_another_runs_channel_is_refused_naming_both[trainer]"),
    "takes_finished_runs": (
        FINISHED_TOO,
        "test_a_finished_runs_channel_is_refused_and_a_failed_ones_is_not[trainer]",
    ),
    "ends_in_silence": (
        ENDS_IN_SILENCE,
        "test_a_waiting_producer_returns_within_a_second_of_the_trainers_end[finished]",
    ),
    "waits_forever": (
        ENDLESS_PATIENCE,
        "test_a_side_that_hears_nothing_of_the_other_gives_up",
    ),
    "takes_any_name": (ANY_NAME, "test_a_name_that_is_no_plain_name_is_refused[../up]"),
    "leaves_in_silence": (
        LEAVES_IN_SILENCE,
        "test_a_producer_that_leaves_returns_its_claims_at_once",
    ),
    "asks_the_same_again": (
        SAME_PRODUCER_AGAIN,
        "test_a_failed_group_goes_to_another_producer_and_is_given_up_in_the_end",
    ),
    "gives_up_at_once": (
        ONE_ATTEMPT,
        "test_a_failed_group_goes_to_another_producer_and_is_given_up_in_the_end",
    ),
    "drops_requests": (DROPS_REQUESTS, "test_a_waiting_claim_is_answered_when_credit_returns"),
    "stays_when_replaced": (
        STAYS_WHEN_REPLACED,
        "test_a_new_trainer_voids_old_claims_and_producers_go_on",
    ),
    "keeps_the_old_session": (
        KEEPS_THE_OLD_SESSION,
        "test_a_new_trainer_voids_old_claims_and_producers_go_on",
    ),
    "breaks_on_rubbish": (BREAKS_ON_RUBBISH, "test_malformed_records_are_skipped_and_reported"),
    "opens_as_both": (OFFERS_BOTH_ROLES, "test_a_shared_channel_is_not_opened_as_both_ends"),
    "serves_the_other_end": (SERVES_THE_OTHER_END, "test_each_end_refuses_what_is_the_others"),
    "says_nothing_of_full_stores": (
        SAYS_NOTHING_OF_FULL_STORES,
        "test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room",
    ),
    "calls_nobody_off": (
        ANSWERS_ABOUT_ROOM.format(called_off=False),
        "test_who_waits_for_room_without_need_is_called_off",
    ),
    "wakes_nobody": (
        ANSWERS_ABOUT_ROOM.format(called_off=True),
        "test_who_waits_for_room_is_woken_when_something_was_freed",
    ),
    "heeds_old_words": (
        HEEDS_OLD_WORDS,
        "test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words",
    ),
    "keeps_old_claims": (
        KEEPS_OLD_CLAIMS,
        "test_who_waits_for_room_hears_that_a_new_trainer_wants_no_old_claim",
    ),
    "sleeps_through_the_end": (
        SLEEPS_THROUGH_THE_END,
        "test_who_waits_for_room_hears_of_the_runs_end",
    ),
    "repeats_a_step": (REPEATS_A_STEP, "test_every_sample_is_received_once_whatever_is_killed"),
    "is_right": ("", "test_a_dead_producers_claims_return"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says of each channel's one test. They mostly wait, so four run at once."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "pytest.ini").write_text("[pytest]\n")

    def outcome(name: str) -> str:
        wrong, test = CAUGHT[name]
        (folder / f"{name}.py").write_text(PLUGIN + wrong)
        (folder / f"test_{name}.py").write_text(SUITE.replace("{module}", name))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "--basetemp", f"{folder}/{name}", f"test_{name}.py::TestSuite::{test}"],
            capture_output=True,
            text=True,
            cwd=folder,
            env=child_environment(),
        )
        return done.stdout + done.stderr

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CAUGHT, pool.map(outcome, CAUGHT), strict=True))


@pytest.mark.parametrize("name", CAUGHT)
def test_a_wrong_channel_is_caught_by_name(name: str, outcomes: dict[str, str]) -> None:
    assert ("1 failed" if CAUGHT[name][0] else "1 passed") in outcomes[name], outcomes[name]
