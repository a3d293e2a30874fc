"""The store suite catches stores that are wrong, each by the test that names the fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = """
from collections.abc import Sequence
from draftcore import hookimpl
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("store", "memory")]

@hookimpl
def feature_store(name, uri):
    import torch
    from dataclasses import replace
    from draftcore.stores import memory
    from draftcore.uris import parse_uri

    class Store(memory.MemoryStore):
        pass

{wrong}
    return Store.open(uri)
"""

SUITE = """
import pytest
from draftcore.testing.stores import StoreSuite

class TestSuite(StoreSuite):
    plugin = "{module}"

    @pytest.fixture
    def store_uri(self):
        return "memory:"
"""

WIDENS = """
    put_many = Store.put_many
    def widened(self, items):
        wide = lambda t: t.float() if t.dtype is torch.bfloat16 else t
        items = [replace(i, tensors={n: wide(t) for n, t in i.tensors.items()}) for i in items]
        return put_many(self, items)
    Store.put_many = widened
"""

SERVES_STALE = """
    get_many = Store.get_many
    def stale(self, refs, device="cpu", names=None):
        held = self.lookup([ref.feature_id for ref in refs])
        return get_many(self, [held.get(ref.feature_id, ref) for ref in refs], device, names)
    Store.get_many = stale
"""

FREES_ONCE = """
    free = Store.free
    def strict(self, refs):
        refs = list(refs)
        for ref in refs:
            self._ledger.require(ref)
        free(self, refs)
    Store.free = strict
"""

IGNORES_NAMES = """
    get_many = Store.get_many
    Store.get_many = lambda self, refs, device="cpu", names=None: get_many(self, refs, device)
"""

ALIASES = """
    put_many = Store.put_many
    def aliased(self, items):
        refs = put_many(self, items)
        for item, ref in zip(items, refs):
            views = {name: tensor.detach() for name, tensor in item.tensors.items()}
            self._tensors[ref.feature_id, ref.generation] = views
        return refs
    Store.put_many = aliased
"""

FREES_BY_ID = """
    free = Store.free
    def newest(self, refs):
        free(self, self.lookup([ref.feature_id for ref in refs]).values())
    Store.free = newest
"""

FREES_UNDER_READERS = """
    class Ledger(memory.Ledger):
        def drop(self, ref):
            self._readers.clear()
            super().drop(ref)
    init = Store.__init__
    def hasty(self, **options):
        init(self, **options)
        self._ledger = Ledger(self._reclaim)
    Store.__init__ = hasty
"""

NO_LIMIT = """
    Store.open = classmethod(lambda cls, uri: cls())
"""

CAUGHT = {
    "stores_bf16_as_fp32": (WIDENS, "test_a_round_trip_is_bit_exact[bfloat16]"),
    "serves_stale_refs": (SERVES_STALE, "test_a_put_again_supersedes_and_the_old_ref_raises"),
    "frees_only_once": (FREES_ONCE, "test_get_after_free_raises_and_free_twice_is_harmless"),
    "ignores_names": (IGNORES_NAMES, "test_names_choose_the_tensors_that_are_read"),
    "aliases_memory": (ALIASES, "test_later_edits_by_the_producer_do_not_reach_the_store"),
    "frees_newer_generations": (FREES_BY_ID, "test_free_never_touches_a_newer_generation"),
    "frees_under_readers": (
        FREES_UNDER_READERS,
        "test_bytes_stay_until_the_last_open_handle_closes[free]",
    ),
    "knows_no_limit": (NO_LIMIT, "test_a_full_store_pushes_back_and_recovers"),
    "is_right": ("", ""),
}


@pytest.fixture(scope="module")
def failures(
    wrong_folder: Path, run_suites: Callable[..., dict[str, set[str]]]
) -> dict[str, set[str]]:
    """Run every wrong store through its test and the right one through all of them."""
    for name, (wrong, _) in CAUGHT.items():
        (wrong_folder / f"{name}.py").write_text(PLUGIN.replace("{wrong}", wrong))
    return run_suites(
        {name: (SUITE.replace("{module}", name), test) for name, (_, test) in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name, (wrong, _) in CAUGHT.items() if wrong])
def test_a_wrong_store_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name][1] in failures[name]


def test_the_right_store_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()
