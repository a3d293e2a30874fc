"""A folder for the segments of a test, in shared memory where there is enough."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftcore_shm.store import SHM


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in shared memory where there is enough, since a disk is slower."""
    roomy = SHM.exists() and shutil.disk_usage(SHM).free > 256 << 20
    place = Path(tempfile.mkdtemp(dir=SHM)) if roomy else tmp_path
    yield place
    shutil.rmtree(place)


@pytest.fixture
def ring(folder: Path) -> str:
    return str(folder / "ring")
