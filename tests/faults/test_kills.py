"""kill -9, freezing and Ctrl-C: the weights say that nothing was lost and nothing done twice."""

import os
import signal

POINTS = {
    "producer": ["captured@2", "put@3", "published@2"],
    "trainer": ["leased@3", "midstep@5", "stepped@3", "written", "unmarked", "saved", "freeing@2"],
}


def test_a_process_may_be_killed_at_any_named_point(drill, undisturbed):
    run = drill(channel="sqlite:{}/channel.db?ttl=2")
    points = [*POINTS["producer"], *POINTS["trainer"], "freed@2"]
    run.sabotage = " ".join(f"kill:{point}" for point in points)
    run.finish()
    assert {mark.name for mark in run.marks.iterdir()} == {f"kill-{point}" for point in points}
    run.require_done()
    assert run.losses() == undisturbed
