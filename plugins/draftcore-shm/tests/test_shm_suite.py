"""The conformance suites, on a segment in shared memory."""

from pathlib import Path

import pytest
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.stores import StoreSuite


class TestShmPlugin(PluginSuite):
    plugin = "draftcore_shm.plugin"


class TestShmStore(StoreSuite):
    plugin = "draftcore_shm.plugin"

    @pytest.fixture
    def store_uri(self, folder: Path) -> str:
        return f"shm:{folder / 'store'}?max_bytes=64MiB"
