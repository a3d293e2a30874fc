"""A store's server that dies, freezes and forgets, alone and together with processes of the run."""

import time
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import pytest

Make = Callable[..., Any]


@pytest.mark.long
def test_a_master_and_a_trainer_may_die_freeze_and_stay_away(
    make_run: Make, undisturbed: Any, master: Any
) -> None:
    store = f"mooncake://127.0.0.1:{master.port}/run?max_bytes=32MiB&patience=8"
    run = make_run(producers=2, store=store, faults="ttl:2 pace:0.3")
    launcher = run.start()
    run.until(lambda: run.steps() >= 3, launcher)
    master.kill()
    time.sleep(2)
    master.start()
    run.until(lambda: run.steps() >= 5, launcher)
    run.kill(*run.trainers())
    run.until(lambda: run.steps() >= 8, launcher)
    master.kill()
    run.kill(run.producers()[0], *run.trainers())
    master.start()
    run.until(lambda: run.steps() >= 10, launcher)
    run.freeze(*run.trainers(), seconds=4)  # longer than its producers may be silent
    run.until(lambda: run.steps() >= 12, launcher)
    run.freeze(master.process.pid, seconds=5)  # longer than its TTL
    run.until(lambda: run.steps() >= 14, launcher)
    master.kill()  # and stays away
    said = f"error: no Mooncake master at 127.0.0.1:{master.port}"
    run.until(lambda: said in run.output(), seconds=60)
    master.start()  # for its sake alone: the library takes long to end without one
    assert run.wait(launcher) == 1
    run.require_clean()
    assert "resuming from step" in run.finish()
    run.require_done(undisturbed)
    with urlopen(f"http://127.0.0.1:{master.metrics}/get_all_keys") as keys:
        assert keys.read().split() == []
