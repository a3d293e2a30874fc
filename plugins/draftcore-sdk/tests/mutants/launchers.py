"""Wrong launchers: the built-in `local`, and what each does otherwise."""

from draftcore_sdk.launchers import LauncherSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import dataclasses
import os
import signal
import subprocess

from draftcore_disagg import local
from draftcore_disagg.launcher import Job
from draftcore.errors import DraftcoreError, UsageError

class Processes(local.Processes):
    pass

class Launcher(local.LocalLauncher):
    def run(self, job):
        before, local.Processes = local.Processes, Processes
        try:
            return super().run(job)
        finally:
            local.Processes = before

== Offer("launcher", "{name}")
== launcher(name): Launcher()
"""
WRONG = """
== has_two_exit_statuses: test_the_exit_status_of_the_ranks_is_returned
Launcher.run(job): return min(super().run(job), 1)
== joins_its_command: test_the_exit_status_of_the_ranks_is_returned: 's $HOME
Launcher.run(job): return super().run(dataclasses.replace(job, command=["sh", "-c", " ".join(job.command)]))
== tells_no_places: test_ranks_are_told_their_places
class Launcher:
    def run(self, job):
        return max(subprocess.run(job.of("trainer")).returncode for _ in range(job.ranks))
== has_one_port: test_two_runs_on_one_machine_meet_at_places_of_their_own
Processes._start_ranks():
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    meeting, local.MEETING = local.MEETING, "NOWHERE"
    super()._start_ranks()
    local.MEETING = meeting
== starts_afresh: test_ranks_and_producers_have_the_environment_of_who_runs_them
Launcher.run(job): return super().run(dataclasses.replace(job, command=["env", "-i", *job.command]))
== starts_in_a_folder_of_its_own: test_ranks_and_producers_have_the_environment_of_who_runs_them: relative
Launcher.run(job): return super().run(dataclasses.replace(job, command=["env", "-C", "/", *job.command]))
== never_restarts: test_ranks_of_which_one_is_killed_or_lost_another_start_again_all_together
Launcher.run(job): return super().run(dataclasses.replace(job, restarts=0))
== tries_once_more: test_a_rank_that_says_why_it_ended_is_not_started_again
Launcher.run(job): return super().run(job) and super().run(job)
== does_not_watch_producers: test_a_producer_that_dies_is_started_again_alone
Processes._watch_producers(): pass
== hides_what_failed: test_what_dies_again_and_again_ends_the_run
Launcher.run(job):
    try:
        return super().run(job)
    except DraftcoreError as error:
        return error.exit_status
== leaves_its_handlers: test_what_dies_again_and_again_ends_the_run
Launcher.run(job):
    try:
        return super().run(job)
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)
== starts_a_producer_that_ended_well: test_a_producer_that_ended_well_is_not_started_again
Processes._watch_producers():
    for child in self.producers:
        if child.code == 0:
            child.start()
    super()._watch_producers()
== hides_what_was_refused: test_a_producer_that_is_refused_ends_the_run
Launcher.run(job):
    try:
        return super().run(job)
    except UsageError as error:
        return error.exit_status
== kills_where_it_should_ask: test_a_signal_reaches_the_ranks_which_end_as_they_like[SIGTERM]
Processes._ask(number, frame): super()._ask(signal.SIGKILL, frame)
== hears_one_signal: test_a_second_signal_ends_ranks_that_go_on
Processes._ask(number, frame):
    if not self.asked:
        super()._ask(number, frame)
== is_interrupted_in_any_case: test_a_signal_that_finds_the_work_done_interrupts_nothing
Processes.run(): return super().run() or 130 * self.asked
== keeps_its_producers: test_producers_come_and_go_while_the_run_goes_on
Fixed(Job).wanted(): return self.producers
Launcher.run(job): return super().run(Fixed(**vars(job)))
== leaves_producers_behind: test_nothing_is_left_of_a_run_that_ended
Processes.run():
    end, local.end = local.end, lambda children, *given: None
    try:
        return super().run()
    finally:
        local.end = end
"""

MUTANTS = Mutants(LauncherSuite, one_file(RIGHT), wrong(WRONG), soon=1.0)
