"""The store `memory`: the conformance suite, and what is its own."""

import subprocess
import sys

import pytest
import torch
from draftcore_sdk.stores import OpenStore, StoreSuite

from draftcore.contracts.store import FeatureStore, StoreItem


class TestMemoryStore(StoreSuite):
    plugin, name = "draftcore.builtin", "memory"

    @pytest.fixture
    def store_uri(self) -> str:
        return "memory:"

    def test_a_get_on_the_cpu_copies_nothing(self, store: FeatureStore) -> None:
        ref = store.put(StoreItem("a", {"x": torch.ones(4)}, 4))
        with store.get(ref) as one, store.get(ref) as other:
            assert one.tensors["x"].data_ptr() == other.tensors["x"].data_ptr()

    def test_the_bare_scheme_is_a_uri(self, open_store: OpenStore) -> None:
        assert open_store("memory").stats().limit_bytes is None


def test_listing_what_is_built_in_imports_no_torch() -> None:
    program = (
        "import sys; from draftcore import builtin; builtin.describe(); "
        "sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
