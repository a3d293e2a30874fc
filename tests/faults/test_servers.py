"""Masters and servers that die, freeze and forget, with the stores and channels of plugins."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from redis import Redis

MakeRun = Callable[..., Any]


def kill(*victims: int) -> None:
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def masters(run: Any) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in run.descendants()}
    return [pid for pid, name in names.items() if name == "mooncake_master"]


@pytest.mark.long
def test_a_master_of_ones_own_may_die_and_redis_forget_beside_any_other_process(
    make_run: MakeRun, undisturbed: dict[int, float], redis: Any
) -> None:
    run = make_run(
        store="mooncake://?max_bytes=32MiB",
        channel=f"redis://127.0.0.1:{redis.port}?prefix=run&ttl=2",
    )
    run.faults = "pace:0.15"
    supervisor = run.start()
    run.until(lambda: run.steps() >= 3, supervisor)
    kill(*masters(run))
    run.until(lambda: run.steps() >= 6, supervisor)
    kill(*run.trainers())  # its master goes with it: producers follow to another one
    run.until(lambda: run.steps() >= 10, supervisor)
    supervisor.kill()
    redis.kill(forget=True)
    supervisor.wait()
    redis.start()
    run.until(lambda: not run.processes() and not run.descendants())
    resumed = run.state()["step"]

    supervisor = run.start("topology.ranks=2")  # both read what lies in the first one's memory
    run.until(lambda: run.steps() >= resumed + 3, supervisor)
    kill(*masters(run), run.producers()[0])
    assert run.wait(supervisor) == 0, run.output()
    assert run.output().count("another one is started") == 2
    run.require_done()
    losses = run.losses()
    assert all(losses[step] == undisturbed[step] for step in range(1, resumed + 1))
    assert losses == pytest.approx(undisturbed, rel=1e-5)
    with Redis(port=redis.port) as client:
        assert all(client.ttl(key) > 0 for key in client.keys("*"))


def test_a_master_and_redis_may_die_forget_freeze_and_stay_away_alone_and_together(
    make_run: MakeRun, undisturbed: dict[int, float], master: Any, redis: Any
) -> None:
    run = make_run(
        store=f"mooncake://127.0.0.1:{master.port}/run?max_bytes=32MiB&patience=8",
        channel=f"redis://127.0.0.1:{redis.port}?prefix=run&ttl=2&limit_refs=8",
    )
    run.faults = "pace:0.1"
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
    for number, (server, seconds) in enumerate(((redis, 4), (master, 5))):
        run.until(lambda: run.steps() >= 13 + 3 * number, supervisor)  # noqa: B023
        server.freeze(seconds)  # longer than its TTL
    run.until(lambda: run.steps() >= 20, supervisor)
    master.kill()  # and stays away
    said = f"error: no Mooncake master at 127.0.0.1:{master.port}"
    run.until(lambda: said in run.output(), seconds=60)
    master.start()  # for its sake alone: the library takes long to end without one
    assert run.wait(supervisor) == 1
    run.require_clean()
    assert "resuming from step" in run.finish()
    run.require_done()
    assert run.losses() == undisturbed
    with urlopen(f"http://127.0.0.1:{master.metrics}/get_all_keys") as keys:
        assert keys.read().split() == []
