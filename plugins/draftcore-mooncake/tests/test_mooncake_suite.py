"""The conformance suites, on a real master and the memory of a process that lends it."""

import pytest
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.stores import StoreSuite

LENT_BYTES = 160 << 20  # as what killed writers left stays


class TestMooncakePlugin(PluginSuite):
    plugin = "draftcore_mooncake.plugin"


class TestMooncakeStore(StoreSuite):
    plugin = "draftcore_mooncake.plugin"

    @pytest.fixture
    def store_uri(self, store_uri: str) -> str:
        return store_uri

    @pytest.fixture
    def store(self, store: MooncakeStore) -> MooncakeStore:
        return store
