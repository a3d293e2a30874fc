"""Masters and servers that die, freeze and forget, with real stores and channels of plugins.

Each run is the one of a single process, bit for bit; see `witness` for how uses are counted.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

SQLITE = "sqlite:{}/channel.db?ttl=2"
OWN_MASTER = "mooncake://?max_bytes=32MiB"


def masters(run):
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in run.servants()}
    return [pid for pid, name in names.items() if name == "mooncake_master"]


def kill(*victims):
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_master_of_ones_own_dies_alone_and_with_the_trainer_and_with_all(drill, undisturbed):
    run = drill(store=OWN_MASTER, channel=SQLITE)
    run.sabotage = "kill:put@3 kill:published@2 pace:0.15"
    supervisor = run.start()
    run.until(lambda: run.steps() >= 3, supervisor)
    kill(*masters(run))
    run.until(lambda: run.steps() >= 6, supervisor)
    kill(*run.trainers())  # its master goes with it: producers follow to another one
    run.until(lambda: run.steps() >= 9, supervisor)
    kill(*masters(run), *run.producers())
    run.until(lambda: run.steps() >= 13, supervisor)
    supervisor.kill()
    supervisor.wait()
    run.until(lambda: not run.processes() and not run.servants())

    assert "resuming from step" in run.finish()
    assert {mark.name for mark in run.marks.iterdir()} == {"kill-put@3", "kill-published@2"}
    assert "another one is started" in run.output()
    run.require_done()
    assert run.losses() == undisturbed


def test_a_master_and_redis_may_die_forget_and_freeze_in_a_run(drill, undisturbed, master, redis):
    run = drill(
        store=f"mooncake://127.0.0.1:{master.port}/drill?max_bytes=32MiB",
        channel=f"redis://127.0.0.1:{redis.port}?prefix=drill&ttl=2",
    )
    run.sabotage = "pace:0.2"
    supervisor = run.start()
    for number, server in enumerate((master, redis)):
        run.until(lambda: run.steps() >= 3 + 3 * number, supervisor)  # noqa: B023
        server.kill()
        time.sleep(2)
        server.start()
    run.until(lambda: run.steps() >= 9, supervisor)
    redis.kill(forget=True)
    master.kill()
    kill(run.producers()[0], *run.trainers())
    redis.start()
    master.start()
    for number, server in enumerate((master, redis)):
        run.until(lambda: run.steps() >= 13 + 3 * number, supervisor)  # noqa: B023
        server.freeze(6)  # longer than either's TTL
    assert run.wait(supervisor) == 0, run.output()
    run.require_done()
    assert run.losses() == undisturbed
    with urlopen(f"http://127.0.0.1:{master.metrics}/get_all_keys") as keys:
        assert keys.read().split() == []


def test_redis_beside_shared_memory_forgets_and_the_supervisor_dies(drill, undisturbed, redis):
    from redis import Redis

    run = drill(channel=f"redis://127.0.0.1:{redis.port}?prefix=drill&ttl=2")
    run.sabotage = "kill:captured@2 kill:stepped@2 pace:0.1"
    supervisor = run.start()
    run.until(lambda: run.steps() >= 5, supervisor)
    redis.kill(forget=True)
    redis.start()
    run.until(lambda: run.steps() >= 9, supervisor)
    redis.kill()
    supervisor.kill()
    supervisor.wait()
    redis.start()
    run.until(lambda: not run.processes())

    assert "resuming from step" in run.finish()
    run.require_done()
    assert run.losses() == undisturbed
    with Redis(port=redis.port) as client:
        assert client.keys("*") == [b"drill:head"]
        assert client.ttl("drill:head") > 0


@pytest.mark.parametrize("which", ["master", "redis"])
def test_a_server_that_stays_away_ends_the_run_in_words_and_the_same_command_goes_on(
    drill, undisturbed, master, redis, which
):
    run = drill(
        store=f"mooncake://127.0.0.1:{master.port}/drill?max_bytes=32MiB&patience=3",
        channel=f"redis://127.0.0.1:{redis.port}?prefix=drill&ttl=2&patience=3",
    )
    run.sabotage = "pace:0.2"
    supervisor, server = run.start(), {"master": master, "redis": redis}[which]
    run.until(lambda: run.steps() >= 5, supervisor)
    server.kill()
    began = time.monotonic()
    assert run.wait(supervisor) == 1
    assert time.monotonic() - began < 40
    said = {"master": "no Mooncake master at", "redis": "does not answer: Connection refused"}
    assert said[which] in run.output()
    server.start()
    assert "resuming from step" in run.finish()
    run.require_done()
    assert run.losses() == undisturbed
