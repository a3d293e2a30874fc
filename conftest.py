"""What all tests share: how they start commands, and that each leaves its process as it was."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for `tests`, in children too

from tests.drills import drill, pytest_addoption, pytest_generate_tests  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def commands_are_forked() -> Iterator[None]:
    from tests.forks import Popen

    before, subprocess.Popen = subprocess.Popen, Popen  # type: ignore[misc]
    yield
    subprocess.Popen = before  # type: ignore[misc]


def of_the_process() -> dict[str, Any]:
    """What every later test of this process would meet."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    found: dict[str, Any] = {
        "the current folder": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in numbers],
    }
    if torch := sys.modules.get("torch"):
        found |= {
            "default dtype": torch.get_default_dtype(),
            "float32 products": torch.get_float32_matmul_precision(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
        }
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that changes for all others what it has of them."""
    before = of_the_process()
    yield
    after = of_the_process()
    assert {name: after[name] for name in before} == before, "a test restores what it sets"
