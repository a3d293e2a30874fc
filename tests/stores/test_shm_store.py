"""The store `shm`: the conformance suite, killed and forked processes, and its file."""

from pathlib import Path

import pytest

from draftcore.testing.stores import StoreSuite


class TestShmStore(StoreSuite):
    plugin = "draftcore.builtin.shm"

    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        return f"shm:{tmp_path / 'ring'}?max_bytes=64MiB"
