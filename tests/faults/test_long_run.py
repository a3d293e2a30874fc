"""What a long run leaves in memory and on the disk: nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

MakeRun = Callable[..., Any]
SLACK = 8 << 20  # bytes; 150 steps that kept their features would hold 15 MB more


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_the_memory_of_no_process_grows_with_the_steps(make_run: MakeRun) -> None:
    run = make_run(producers=1, train={"epochs": 20})
    launcher = run.start()
    run.until(lambda: run.steps() >= 80, launcher)
    before = {pid: resident(pid) for pid in run.processes()}
    run.until(lambda: run.steps() >= 230, launcher)
    grown = {pid: resident(pid) - size for pid, size in before.items()}
    assert len(grown) == 3
    assert run.wait(launcher) == 0
    assert max(grown.values()) < SLACK, grown
    assert set(run.uses().values()) == {20}
    run.require_clean()
