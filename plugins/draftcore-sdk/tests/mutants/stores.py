"""Wrong stores: the built-in `file` or the SQLite store of `new-plugin`, and what each does otherwise."""

from draftcore_sdk.new_plugin import TEMPLATES
from draftcore_sdk.stores import StoreSuite

from mutants import Mutants, wrong

SQLITE = (TEMPLATES / "store/PACKAGE/store.py.txt").read_text().replace("NAME", "file")

RIGHT = f"""{SQLITE}

import os
import time
import unicodedata
import zlib
from contextlib import nullcontext
from dataclasses import replace

import torch
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.contracts.store import Handle, StoreFull
from draftcore_file import base
from draftcore_file import store as file
from draftcore_file.store import FileStore

class Store(FileStore):
    pass

class Renaming(FileStore):
    # Keeps each sample under what `key` makes of its id.
    def put_many(self, items):
        renamed = [replace(item, feature_id=self.key(item.feature_id)) for item in items]
        found = zip(super().put_many(renamed), items)
        return tuple(replace(ref, feature_id=item.feature_id) for ref, item in found)

    def get_many(self, refs, device="cpu", names=None):
        renamed = [replace(ref, feature_id=self.key(ref.feature_id)) for ref in refs]
        handles = super().get_many(renamed, device, names)
        for handle, ref in zip(handles, refs):
            handle.ref = ref
        return handles

    def lookup(self, ids):
        held = super().lookup([self.key(one) for one in ids])
        found = {{one: held.get(self.key(one)) for one in ids}}
        return {{one: replace(ref, feature_id=one) for one, ref in found.items() if ref}}

    def free(self, refs):
        super().free([replace(ref, feature_id=self.key(ref.feature_id)) for ref in refs])

class Numbering(SqliteStore):
    # Names each generation by a `number`.
    def put_many(self, items):
        pairs = zip(super().put_many(items), items)
        refs = [replace(ref, generation=f"{{self.number(item):032x}}") for ref, item in pairs]
        rows = [(ref.generation, json.dumps(ref.to_json()), ref.feature_id) for ref in refs]
        self._change("update samples set put = ?, ref = ? where id = ?", rows)
        return tuple(refs)

class Changing(FileStore):
    # Keeps what `change` makes of each tensor.
    def put_many(self, items):
        changed = [{{n: self.change(t) for n, t in i.tensors.items()}} for i in items]
        return super().put_many([replace(i, tensors=t) for i, t in zip(items, changed)])

class Returning(FileStore):
    # Hands out what `change` makes of the tensors of a sample.
    def _read(self, refs, names):
        return [self.change(found) for found in super()._read(refs, names)]

class Trusting(FileStore):
    # Reads without a look at the digests.
    def unchecked(self, refs, device, names):
        wanted = [base.select_names(ref, names) for ref in refs]
        with self._mutex:
            self._require_open()
            held = self._require_held(refs)
            self._readers.update(ref.key for ref in held)
        found = [{{n: t.to(device) for n, t in own.items()}} for own in self._read(held, wanted)]
        return tuple(Handle(*one, self._handle_closed) for one in zip(held, found))

@hookimpl
def describe():
    return [Offer("store", "file", frozenset({{"shared", "durable"}}))]

@hookimpl
def feature_store(name, uri):
    return (Store if issubclass(Store, SqliteStore) else Store.open)(uri)
"""

WRONG = """
== stores_bf16_as_fp32: test_a_round_trip_is_bit_exact[bfloat16]
Store(Changing).change(t): return t.float() if t.dtype is torch.bfloat16 else t
== returns_strided_tensors: test_a_round_trip_is_bit_exact[bool]
Store(Returning).change(found):
    return {n: t.T.contiguous().T if t.dim() == 2 else t for n, t in found.items()}
== writes_each_storage_once: test_tensors_may_differ_in_type_and_share_their_memory
Store.put_many(items):
    once = lambda tensors: {t.untyped_storage().data_ptr(): (n, t) for n, t in tensors.items()}
    return super().put_many([replace(i, tensors=dict(once(i.tensors).values())) for i in items])
== keeps_gradients: test_a_tensor_with_gradient_is_stored_without
Store(Returning).change(found):
    return {n: t.requires_grad_() if t.is_floating_point() else t for n, t in found.items()}
== aliases_memory: test_later_edits_by_the_producer_do_not_reach_the_store
GIVEN = {}
Store.put_many(items):
    refs = super().put_many(items)
    GIVEN.update({ref.generation: item.tensors for ref, item in zip(refs, items)})
    return refs
Store._read(refs, names):
    return [{n: GIVEN[r.generation][n].detach() for n in some} for r, some in zip(refs, names)]
== ignores_the_device_for_many: test_tensors_come_to_the_device_that_is_asked_for[meta]
Store.get(ref, device="cpu", names=None): return super().get_many([ref], device, names)[0]
Store.get_many(refs, device="cpu", names=None): return super().get_many(refs, "cpu", names)
== forgets_provenance: test_a_ref_describes_its_sample
Store.lookup(ids):
    return {one: replace(ref, provenance="") for one, ref in super().lookup(ids).items()}
== counts_numbers_as_bytes: test_a_ref_describes_its_sample
Store.put_many(items):
    numel = lambda item: sum(t.numel() for t in item.tensors.values())
    refs = zip(super().put_many(items), items)
    return tuple(replace(ref, nbytes=numel(item)) for ref, item in refs)
== reads_every_sample_once: test_refs_come_in_the_order_of_the_put
Store.get_many(refs, device="cpu", names=None):
    return super().get_many(list(dict.fromkeys(refs)), device, names)
== looks_up_none: test_odd_ids_are_ids_like_others
Store.lookup(ids): return {**dict.fromkeys(ids), **super().lookup(ids)}
== normalises_ids: test_odd_ids_are_ids_like_others
Store(Renaming).key(one): return unicodedata.normalize("NFC", one)
== reads_ids_as_numbers: test_odd_ids_are_ids_like_others
Store(Renaming).key(one): return str(float(one)) if one.replace(".", "").isdigit() else one
== aborts_what_is_alike: test_odd_ids_are_ids_like_others
Store(SqliteStore).abort(feature_id):
    rows = self._db.execute("select id from samples where id like ?", [feature_id]).fetchall()
    self.free(self.lookup([one for (one,) in rows]).values())
== hashes_ids_to_16_bits: test_a_thousand_ids_stay_apart
Store(Renaming).key(one): return str(zlib.crc32(one.encode()) & 0xFFFF)
== takes_no_names_for_all: test_names_choose_the_tensors_that_are_read
Store.get_many(refs, device="cpu", names=None): return super().get_many(refs, device, names or None)
== reads_names_by_their_beginning: test_names_choose_the_tensors_that_are_read
Store._read(refs, names):
    begin = lambda ref, some: [x.name for x in ref.tensors if x.name.startswith(tuple(some))]
    return super()._read(refs, list(map(begin, refs, names)))
== puts_an_id_twice: test_a_sample_twice_in_one_put_is_refused
Store.put_many(items): return tuple(map(self.put, items))
Store.put(item): return super().put_many([item])[0]
== serves_stale_refs: test_a_put_again_supersedes_and_the_old_ref_raises
Store.get_many(refs, device="cpu", names=None):
    held = self.lookup([ref.feature_id for ref in refs])
    return super().get_many([held.get(ref.feature_id, ref) for ref in refs], device, names)
== names_a_generation_by_its_content: test_a_put_again_supersedes_and_the_old_ref_raises
Store(Numbering).number(item): return int(item.tensors["x"].sum())
== keeps_all_versions: test_free_never_touches_a_newer_generation
-        self._change("create table if not exists samples (id primary key,
+        self._change("create table if not exists samples (id,

-        question = "select ref from samples where id = ?"
+        question = "select ref from samples where id = ? order by put desc"

-        self._change("delete from samples where (id, put) = (?, ?)", [ref.key for ref in refs])
+        gone = [ref.key for ref in refs if not self._puts.locked()]
+        self._change("delete from samples where (id, put) = (?, ?)", gone)

-    return (Store if issubclass(Store, SqliteStore) else Store.open)(uri)
+    return SqliteStore(uri)
== reads_into_a_ring: test_an_open_handle_keeps_its_bytes_whatever_comes_later
class Store(Returning):
    ring, turn = torch.zeros(16, 1 << 14, dtype=torch.uint8), 0

    def change(self, found):
        copies = {}
        for name, tensor in found.items():
            self.turn = (self.turn + 1) % 16
            room = self.ring[self.turn][: tensor.nbytes].view(tensor.dtype)
            copies[name] = room.view(tensor.shape).copy_(tensor)
        return copies
== cannot_close_a_handle_of_a_closed_store: test_an_open_handle_keeps_its_bytes_whatever_comes_later
Store._handle_closed(ref):
    self._require_open()
    super()._handle_closed(ref)
== frees_equal_bytes: test_get_after_free_raises_and_free_twice_is_harmless[free]
Store.free(refs):
    refs = list(refs)
    gone = {spec.digest for ref in refs for spec in ref.tensors}
    super().free([*refs, *(r for r in self._held.values() if r.tensors[0].digest in gone)])
== frees_only_once: test_get_after_free_raises_and_free_twice_is_harmless[free]
Store.free(refs):
    refs = list(refs)
    for ref in refs:
        self.get(ref).close()  # raises for what is not held
    super().free(refs)
== reads_refs_twice: test_get_after_free_raises_and_free_twice_is_harmless[free]
Store.free(refs):
    self.lookup([ref.feature_id for ref in refs])
    super().free(refs)
== frees_under_readers: test_bytes_stay_until_the_last_open_handle_closes[free]
OPENED = []
Store.get_many(refs, device="cpu", names=None):
    OPENED.extend(super().get_many(refs, device, names))
    return tuple(OPENED[len(OPENED) - len(refs) :])
Store.free(refs):
    refs = list(refs)
    for handle in OPENED:
        if handle.ref in refs:
            handle.close()  # its bytes are gone
    super().free(refs)
== closes_a_handle_twice: test_bytes_stay_until_the_last_open_handle_closes[free]
Twice(Handle).close(): self.on_close(self.ref)
Store.get_many(refs, device="cpu", names=None):
    handles = super().get_many(refs, device, names)
    return tuple(Twice(h.ref, h.tensors, h.on_close) for h in handles)
== opens_one_after_the_other: test_a_get_of_several_opens_all_or_none
Store.get_many(refs, device="cpu", names=None):
    return tuple(super(Store, self).get_many([ref], device, names)[0] for ref in refs)
== puts_one_after_the_other: test_a_put_that_fails_leaves_what_was_held
Store.put_many(items):
    base.describe_items(items, "", "")
    return tuple(super(Store, self).put_many([item])[0] for item in items)
== counts_puts: test_a_put_that_fails_leaves_what_was_held
Store.stats():
    found = super().stats()
    return replace(found, nbytes=sum(f.stat().st_size for f in self.folder.glob("shard*")))
== serves_when_closed: test_a_closed_store_says_so_and_its_own_uri_opens_it_again
Store._require_open(): pass
== has_a_manifest_when_closed: test_a_closed_store_says_so_and_its_own_uri_opens_it_again
Store.read_manifest():
    closed, self._closed = self._closed, False
    found, self._closed = super().read_manifest(), closed
    return found
== has_a_uri_that_opens_nothing: test_a_closed_store_says_so_and_its_own_uri_opens_it_again
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self.uri = f"files://{self.folder}"
== has_a_relative_uri: test_its_own_uri_opens_it_from_any_folder_whatever_its_path
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self.uri = f"file:{os.path.relpath(self.folder)}"
== has_a_uri_that_is_not_quoted: test_its_own_uri_opens_it_from_any_folder_whatever_its_path
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self.uri = f"file:{self.folder}"
== has_another_uri: test_two_processes_see_each_others_samples
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self.uri = f"file:{self.folder.parent / 'other'}"
== forgets_the_oldest: test_a_full_store_pushes_back_and_recovers
Store.put_many(items):
    while True:
        try:
            return super().put_many(items)
        except StoreFull:
            oldest = min(self._held.values(), key=lambda ref: ref.generation, default=None)
            if oldest is None:
                raise
            self.free([oldest])
== names_no_limit: test_a_full_store_pushes_back_and_recovers
Store.stats(): return replace(super().stats(), limit_bytes=None)
== counts_only_what_is_held: test_bytes_that_are_still_read_count_against_the_limit[free]
Store.stats():
    found = super().stats()
    return replace(found, nbytes=found.nbytes - sum(r.nbytes for r in self._pending_free.values()))
== forgets_readers_of_what_is_put_again: test_bytes_that_are_still_read_count_against_the_limit[put]
Store.put_many(items):
    refs = super().put_many(items)
    self._pending_free.clear()
    return refs
== leaves_files_open: test_samples_that_come_and_go_leave_nothing_behind
Store(Returning).change(found):
    os.open(self.folder, os.O_RDONLY)
    return found
== keeps_copies: test_samples_that_come_and_go_leave_nothing_behind
class Store(Returning):
    kept = []

    def change(self, found):
        self.kept.append({n: t.clone() for n, t in found.items()})
        return found
== knows_one_thread: test_threads_put_get_and_free_side_by_side
-        self._db = sqlite3.connect(self.file, timeout=60, check_same_thread=False)
+        self._db = sqlite3.connect(self.file, timeout=60)

-    return (Store if issubclass(Store, SqliteStore) else Store.open)(uri)
+    return SqliteStore(uri)
== puts_side_by_side: test_threads_that_put_one_id_leave_one_of_their_puts
-        self._change("create table if not exists samples (id primary key,
+        self._change("create table if not exists samples (id,

-        self._db = sqlite3.connect(
+        self._puts = nullcontext()
+        self._db = sqlite3.connect(

-        rows = []
+        rows = []
+        time.sleep(0.02)

-    return (Store if issubclass(Store, SqliteStore) else Store.open)(uri)
+    return SqliteStore(uri)
== names_generations_by_content: test_free_never_touches_a_newer_generation: old generation
Store(Numbering).number(item): return int(item.tensors["x"][0])
== counts_generations: test_an_old_ref_never_reads_what_a_restarted_process_put
PUTS = iter(range(1, 1 << 40))
Store(Numbering).number(item): return next(PUTS)
== removes_what_others_write: test_what_another_process_puts_meanwhile_is_read_whole
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self._sync = lambda path: time.sleep(0.02)  # a slow disk
    for partial in self.folder.glob("*.tmp"):
        partial.unlink(missing_ok=True)
== lives_in_one_process: test_two_processes_see_each_others_samples
Store.__init__(folder, **options):
    super().__init__(folder / str(os.getpid()), **options)
    self.uri = f"file:{folder}"
== counts_what_it_put_itself: test_two_processes_see_each_others_samples
Store.__init__(folder, **options):
    super().__init__(folder, **options)
    self.samples = super()._usage()[0]
Store.put_many(items):
    self.samples += len(items)
    return super().put_many(items)
Store._usage(): return (self.samples, *super()._usage()[1:])
== deletes_before_it_sets: test_what_another_process_puts_meanwhile_is_read_whole
Store(SqliteStore)._write(refs, tensors):
    self._change("delete from samples where id = ?", [(ref.feature_id,) for ref in refs])
    time.sleep(0.02)  # a round trip
    super()._write(refs, tensors)
== forgets_what_was_freed: test_a_reopened_store_holds_what_was_put_and_not_what_was_freed
Store.free(refs):
    keys = {ref.key for ref in refs}
    self.gone = getattr(self, "gone", set()) | keys
Store._find(ids):
    found = super()._find(ids)
    return {k: v for k, v in found.items() if v.key not in getattr(self, "gone", ())}
== limits_what_it_put_itself: test_a_reopened_store_holds_what_was_put_and_not_what_was_freed
class Store(FileStore):
    before = None

    def _usage(self):
        samples, nbytes, free = super()._usage()
        self.before = nbytes if self.before is None else self.before
        return samples, nbytes - self.before, free
== keeps_the_manifest_in_memory: test_the_manifest_is_replaced_as_a_whole_and_outlives_the_samples
class Store(FileStore):
    manifest = None

    def read_manifest(self):
        return self.manifest

    def write_manifest(self, data):
        self.manifest = data
== reads_the_manifest_that_it_wrote: test_the_manifest_is_replaced_as_a_whole_and_outlives_the_samples
class Store(FileStore):
    written = None

    def read_manifest(self):
        return self.written or super().read_manifest()

    def write_manifest(self, data):
        self.written = data
        super().write_manifest(data)
== merges_the_manifest: test_the_manifest_is_replaced_as_a_whole_and_outlives_the_samples
Store.write_manifest(data): super().write_manifest({**(self.read_manifest() or {}), **data})
== writes_under_its_name: test_a_killed_put_is_there_as_a_whole_or_not_at_all[time]
Store._write(refs, tensors):
    self.folder.mkdir(exist_ok=True)
    path = self.folder / file._name(refs[0].generation)
    path.write_bytes(b"".join(file._safetensors(refs, tensors)))
== indexes_before_it_writes: test_a_killed_put_is_there_as_a_whole_or_not_at_all[line]
Store(SqliteStore)._write(refs, tensors):
    rows = [(*ref.key, ref.nbytes, json.dumps(ref.to_json())) for ref in refs]
    self._change("insert or replace into samples values (?, ?, ?, ?, x'')", rows)
    super()._write(refs, tensors)
== writes_64_samples_at_a_time: test_a_killed_put_is_there_as_a_whole_or_not_at_all[line]
Store(SqliteStore)._write(refs, tensors):
    for start in range(0, len(refs), 64):
        super()._write(refs[start : start + 64], tensors[start : start + 64])
== trusts_its_disk: test_altered_bytes_raise_and_name_the_sample
Store(Trusting).get_many(refs, device="cpu", names=None):
    return self.unchecked(refs, device, names)
== checks_what_it_reads_once: test_altered_bytes_raise_and_name_the_sample
SEEN = set()
Store(Trusting).get_many(refs, device="cpu", names=None):
    seen = SEEN.issuperset(refs)
    SEEN.update(refs)
    return (self.unchecked if seen else super().get_many)(refs, device, names)
"""

MUTANTS = Mutants(StoreSuite, {"{name}.py": RIGHT}, wrong(WRONG))
