"""Stores and channels that are full, torn or altered, and producers that send nonsense."""

import pytest

from draftcore.testing.targets import tiny_target

CHANNELS = {"sqlite": "sqlite:{}/channel.db?ttl=2", "dir": "dir:{}/channel?ttl=2"}


@pytest.mark.parametrize("channel", CHANNELS)
def test_what_is_torn_doubled_altered_or_does_not_fit_is_done_again(drill, undisturbed, channel):
    run = drill(channel=CHANNELS[channel])
    deeds = ["twice:publish@2", "flip:published@3", "full:publish@4", "full:advance@3"]
    deeds += ["torn:publish@5"] if channel == "dir" else []
    run.sabotage = " ".join(deeds)
    said = run.finish(code=1)
    assert "cannot be written" in said
    assert "free space on its disk" in said
    run.finish()
    assert len(list(run.marks.iterdir())) == len(deeds)
    run.require_done()
    assert run.losses() == undisturbed


def test_a_store_that_is_too_small_for_the_data_is_used_again_and_again(drill, undisturbed):
    run = drill(store="shm:{}/ring?max_bytes=400KiB", topology={"producers": 2})
    run.finish()
    assert not (run.folder / "ring").exists()
    run.require_done()
    assert run.losses() == undisturbed


def test_a_store_that_cannot_hold_one_step_is_refused_in_words(drill):
    run = drill(
        store="shm:{}/ring?max_bytes=60KiB", capture={"batch": 1}, topology={"producers": 2}
    )
    assert "raise max_bytes in the store's URI" in run.finish(code=1)


def test_samples_that_cannot_be_captured_are_given_up_and_all_others_are_not(drill):
    run = drill(channel=CHANNELS["sqlite"] + "&attempts=2", capture={"batch": 1})
    run.sabotage = "raise:q7? narrow:q9? lacking:q11?"
    said = run.finish()
    given_up = run.state()["given_up"]
    assert sorted(reason.split()[0] for reason in given_up.values()) == [
        "capture",
        "sample",
        "sample",
    ]
    reasons = " ".join(given_up.values())
    for words in ("no capture of q7?", "has hidden.1 of shape", "lacks last_hidden"):
        assert words in reasons
    assert said.count("is given up") == 3
    run.require_done(without=frozenset({7, 9, 11}))


def test_a_producer_with_another_target_is_turned_away(drill, tmp_path, undisturbed):
    other = tiny_target(tmp_path / "other", seed=1)
    run = drill(channel=CHANNELS["sqlite"], topology={"producers": 0})
    trainer = run.start("--role", "trainer")
    stranger = run.start("--role", "producer", f"target.path={other}")
    assert run.wait(stranger) == 1
    assert "features captured here are not what the trainer trains on" in run.output()
    producer = run.start("--role", "producer")
    assert run.wait(trainer) == 0
    assert run.wait(producer) == 0
    run.require_done()
    assert run.losses() == undisturbed
