"""Wrong stores: the built-in `file`, and what each does otherwise."""

from draftcore_sdk.stores import StoreSuite

from mutants import Mutant, Mutants

RIGHT = """
from dataclasses import replace

import torch

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.features.stores.file import FileStore

class Store(FileStore):
    pass

@hookimpl
def describe():
    return [Offer("store", "mine")]

@hookimpl
def feature_store(name, uri):
    return Store.open(uri)
"""

WRONG = {
    "stores_bf16_as_fp32": Mutant(
        "test_a_round_trip_is_bit_exact[bfloat16]",
        """
        class Store(FileStore):
            def put_many(self, items):
                wide = lambda t: t.float() if t.dtype is torch.bfloat16 else t
                wider = lambda tensors: {name: wide(t) for name, t in tensors.items()}
                return super().put_many([replace(i, tensors=wider(i.tensors)) for i in items])
        """,
    ),
    "serves_stale_refs": Mutant(
        "test_a_put_again_supersedes_and_the_old_ref_raises",
        """
        class Store(FileStore):
            def get_many(self, refs, device="cpu", names=None):
                held = self.lookup([ref.feature_id for ref in refs])
                newest = [held.get(ref.feature_id, ref) for ref in refs]
                return super().get_many(newest, device, names)
        """,
    ),
    "frees_only_once": Mutant(
        "test_get_after_free_raises_and_free_twice_is_harmless[free]",
        """
        class Store(FileStore):
            def free(self, refs):
                refs = list(refs)
                for ref in refs:
                    self.get(ref).close()  # raises for what is not held
                super().free(refs)
        """,
    ),
    "ignores_names": Mutant(
        "test_names_choose_the_tensors_that_are_read",
        """
        class Store(FileStore):
            def get_many(self, refs, device="cpu", names=None):
                return super().get_many(refs, device)
        """,
    ),
    "aliases_memory": Mutant(
        "test_later_edits_by_the_producer_do_not_reach_the_store",
        """
        GIVEN = {}

        class Store(FileStore):
            def put_many(self, items):
                refs = super().put_many(items)
                GIVEN.update({ref.generation: item.tensors for ref, item in zip(refs, items)})
                return refs

            def get_many(self, refs, device="cpu", names=None):
                handles = super().get_many(refs, device, names)
                for handle in handles:
                    given = GIVEN[handle.ref.generation]
                    handle.tensors = {name: given[name].detach() for name in handle.tensors}
                return handles
        """,
    ),
    "frees_newer_generations": Mutant(
        "test_free_never_touches_a_newer_generation",
        """
        class Store(FileStore):
            def free(self, refs):
                super().free(self.lookup([ref.feature_id for ref in refs]).values())
        """,
    ),
    "frees_under_readers": Mutant(
        "test_bytes_stay_until_the_last_open_handle_closes[free]",
        """
        OPENED = []

        class Store(FileStore):
            def get_many(self, refs, device="cpu", names=None):
                OPENED.extend(super().get_many(refs, device, names))
                return tuple(OPENED[len(OPENED) - len(refs) :])

            def free(self, refs):
                refs = list(refs)
                for handle in OPENED:
                    if handle.ref in refs:
                        handle.close()  # its bytes are gone
                super().free(refs)
        """,
    ),
    "knows_no_limit": Mutant(
        "test_a_full_store_pushes_back_and_recovers",
        """
        class Store(FileStore):
            @classmethod
            def open(cls, uri):
                return super().open(uri.partition("?")[0])
        """,
    ),
}

# Most tests of this suite have caught nothing here.
MUTANTS = Mutants(StoreSuite, {"{name}.py": RIGHT}, WRONG, every_test=False)
