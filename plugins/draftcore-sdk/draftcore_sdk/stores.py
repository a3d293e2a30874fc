"""What every feature store must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `store_uri` where a store needs more than a folder. A durable
store whose files do not hold tensors as they are also says how to `alter` what it stored, and one whose
limit is not the URI option `max_bytes` overrides `with_limit`.
"""

import atexit
import ctypes
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast
from urllib.parse import quote

import pytest
import torch
from draftcore_file.base import BaseStore
from torch import Tensor

from draftcore.contracts.store import (
    DurableStore,
    FeatureStore,
    Handle,
    SampleRef,
    StoreError,
    StoreFull,
    StoreItem,
    TensorSpec,
)
from draftcore.errors import DraftcoreError
from draftcore.uris import format_size
from draftcore_sdk.limits import Limit
from draftcore_sdk.memory import watched_bytes
from draftcore_sdk.suite import Suite, child_environment, offer_of, opened, path_of

Store = FeatureStore
Open = Callable[..., FeatureStore]
Tensors = Mapping[str, Tensor]
DTYPES = ["bfloat16", "float16", "float32", "int64", "bool"]
ODD_IDS = [
    *("a/b/../c", "/abs", "..", ".", "", "a", "A", "a ", "a/b", "a_b", "a%2Fb", "a\0b", "*", "'"),
    *("ünïcødé 漢字 🙂", "u\u0308", "\u00fc", "with space\nand line", "manifest.json", "-rf"),
    *("x" * 3000, "x" * 2999 + "y", "7", "007", "7.0", "1e3", "1000", "%", "a%", "[a]"),
]
# Each two share 32 bits of crc32, adler32, fnv1a, murmur3 and xxh32, of both halves of xxh64 and xxh3_64, of
# blake2b and blake2s of 4 bytes, and of both ends of md5, sha1, sha256 and blake2b.
TWINS = "plumless buckeroo 120 201 40189 797186 29517 87960 35566 149360 130737 181333 57439 162920"
TWINS += " 50446 129050 8680 141092 39506 40625 108870 120076 25302 82945 86786 88266 35097 40686"
TWINS += " 91043 144686 69235 95303 77071 108943 29544 101170 28870 58382"
PATTERNS = ["%", "*", "a_b", "A", "[a]"]  # ids that would match others
BIG = 8192  # numbers of 8 bytes in a sample that a limit notices
KILLS = 16  # at lines of the store's code, spread over all of them
MANY = 70  # samples of a put that a store might cut
PATIENCE = 30  # seconds that another process is given
ODD = "100% odd?#&+ ü"  # a folder
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000


class StoreSuite(Suite):
    """The behaviour of a store, opened through its plugin."""

    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        """The URI of an empty store; by default in a fresh folder."""
        uri = f"{offer_of(self.plugin, 'store', self.name).name}:{tmp_path / 'store'}"
        return self.with_limit(uri, 64 << 20)  # as some claim all that they may hold at once

    def with_limit(self, uri: str, nbytes: int) -> str:
        """Return the URI of a store that holds at most `nbytes`."""
        uri = re.sub(r"max_bytes=[^&]*&?", "", uri).rstrip("?&")
        return f"{uri}{'&' if '?' in uri else '?'}max_bytes={nbytes}"

    def alter(self, uri: str) -> None:
        """Change a byte of every tensor that a durable store holds, behind its back while it is open."""
        path, found = path_of(uri), 0
        for file in filter(Path.is_file, path.rglob("*") if path else ()):
            data, there = re.subn(rb"(in small|in large)(?!\1)", rb"not this", file.read_bytes())
            found += there  # the last number of each tensor
            if there:
                file.chmod(0o600)
                file.write_bytes(data)
        if not found:
            pytest.skip("only its author can say how: override `alter` in a subclass of StoreSuite")

    @pytest.fixture
    def open_store(self, store_uri: str) -> Iterator[Open]:
        """Open the store, or another URI, any number of times; all are closed at the end."""
        opened: list[FeatureStore] = []

        def opener(uri: str = store_uri) -> FeatureStore:
            opened.append(open_through(self.plugin, uri))
            return opened[-1]

        yield opener
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: Open) -> FeatureStore:
        return open_store()

    @pytest.fixture
    def elsewhere(self) -> "Elsewhere":
        return _elsewhere(os.path.realpath("/proc/self/ns/net"))

    @pytest.fixture
    def shared(self) -> None:
        self.require("shared", "to be reached by several processes")

    @pytest.fixture
    def durable(self) -> None:
        self.require("durable", "to outlive its processes")

    @property
    def capabilities(self) -> frozenset[str]:
        return offer_of(self.plugin, "store", self.name).capabilities

    def require(self, capability: str, meaning: str) -> None:
        if capability not in self.capabilities:
            pytest.skip(f"the store does not claim {meaning} (capability {capability})")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_round_trip_is_bit_exact(self, store: Store, dtype: str) -> None:
        """Every bit pattern comes back, also NaN payloads; and views, empty and scalar tensors."""
        batch = any_bits(dtype, 3, 8, 6)
        tensors = {
            "rows of a padded batch": batch[1, :5], "transposed": batch[0].T,
            "strided": batch[:, ::2, 1::2], "expanded": batch[:1, :1, :1].expand(4, 2, 3),
            "odd": any_bits(dtype, 33, 7), "flat": any_bits(dtype, 5),
            "empty": any_bits(dtype, 0, 16), "scalar": any_bits(dtype),
        }  # fmt: skip
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with store.get(store.put(StoreItem("a", tensors, 5))) as handle:
            require_same(tensors, before, " in what was given to put")
            require_same(handle.tensors, tensors)
            strided = [name for name, one in handle.tensors.items() if not one.is_contiguous()]
            assert not strided, f"tensors come back contiguous, and {strided} are not"

    def test_tensors_may_differ_in_type_and_share_their_memory(self, store: Store) -> None:
        """Odd sizes of small types must not put the others out of alignment, nor large ones be cut."""
        base, large = any_bits("float32", 6, 4), any_bits("int64", 500_000)
        tensors = {dtype: any_bits(dtype, 3, 5) for dtype in sorted(DTYPES)}
        tensors |= {"all": base, "again": base, "tail": base[2:], "column": base[:, 1]}
        both = [tensors, {"x": base, "large": large}]
        refs = store.put_many([StoreItem(f"{len(one)}", one, 6) for one in both])
        for ref, expected in zip(refs, both, strict=True):
            with store.get(ref) as handle:
                require_same(handle.tensors, expected)

    def test_a_tensor_with_gradient_is_stored_without(self, store: Store) -> None:
        given = {"x": torch.ones(2, requires_grad=True) * 2}
        with store.get(store.put(StoreItem("a", given, 2))) as handle:
            assert not handle.tensors["x"].requires_grad, "x comes back with a gradient"
            require_same(handle.tensors, given)

    def test_later_edits_by_the_producer_do_not_reach_the_store(self, store: Store) -> None:
        buffer = torch.zeros(4, 3)
        ref = store.put(StoreItem("a", {"x": buffer}, 4))
        buffer.fill_(9)
        with store.get(ref) as handle:
            require_same(handle.tensors, {"x": torch.zeros(4, 3)})

    @pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
    def test_tensors_come_to_the_device_that_is_asked_for(self, store: Store, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        item = numbered("a", 1)
        ref = store.put(item)
        for handle in (store.get(ref, device), *store.get_many([ref], device, ["x"])):
            found = handle.tensors["x"]
            assert found.device.type == device, f"x lies on {found.device}, {device} was asked for"
            if device != "meta":
                require_same({"x": found.cpu()}, item.tensors)
            handle.close()

    def test_a_ref_describes_its_sample(self, store: Store) -> None:
        tensors = {"x.1": any_bits("bfloat16", 6, 4), "m": any_bits("bool", 6)}
        origin = "run 1, " + "and how, " * 99
        ref = store.put(StoreItem("a", tensors, 7, origin))
        digests = {spec.name: spec.digest for spec in ref.tensors}  # the store's choice
        kinds = [("x.1", (6, 4), "bfloat16"), ("m", (6,), "bool")]
        specs = tuple(TensorSpec(*one, digests.get(one[0], "")) for one in kinds)
        nbytes = 6 * 4 * 2 + 6
        expected = SampleRef("a", ref.generation, store.uri, specs, 7, nbytes, origin)
        require_ref(ref, expected, "put")
        require_held(store, a=ref)
        with store.get(SampleRef.from_json(json.loads(json.dumps(ref.to_json())))) as handle:
            require_ref(handle.ref, ref, "a handle")

    def test_refs_come_in_the_order_of_the_put(self, store: Store) -> None:
        items = [numbered(f"s{number}", number) for number in (3, 1, 2)]
        refs = store.put_many(items)
        assert [ref.feature_id for ref in refs] == ["s3", "s1", "s2"]
        handles = store.get_many([refs[2], refs[0], refs[2]])
        assert [number_of(handle) for handle in handles] == [2, 3, 2]
        for handle in handles:
            assert number_of(handle) in (2, 3), "another handle of one sample was closed"
            handle.close()
        assert store.put_many([]) == ()
        assert store.get_many([]) == ()

    def test_odd_ids_are_ids_like_others(self, store: Store) -> None:
        refs = store.put_many([numbered(name, at) for at, name in enumerate(ODD_IDS)])
        for at, ref in enumerate(refs):
            require_held(store, **{ref.feature_id: ref})
            assert number_in(store, ref) == at, f"the id {ref.feature_id[:50]!r} reads another's"
        store.free(refs[:3])
        for name in PATTERNS:
            store.abort(name)
        gone = dict.fromkeys([*ODD_IDS[:3], *PATTERNS, "absent"])
        kept = {ref.feature_id: ref for ref in refs if ref.feature_id not in gone}
        require_held(store, **gone, **kept)
        require_stats(store, samples=len(kept))

    def test_a_thousand_ids_stay_apart(self, store: Store) -> None:
        """Ids that are hashed to 16 bits, or cut, meet each other here; and those hashed to 32."""
        texts = (bytes([number % 256, number >> 8]) for number in range(1000 - len(TWINS.split())))
        names = [*TWINS.split(), *(sha256(text).hexdigest() for text in texts)]
        for start in range(0, 1000, 200):
            some = enumerate(names[start : start + 200], start)
            store.put_many([numbered(name, number, 1) for number, name in some])
        held = store.lookup(names)
        alone = sum(name in store.lookup([name]) for name in names)
        assert alone == 1000, f"{alone} of 1000 ids are held: some share a key"
        assert len(held) == 1000, f"lookup of 1000 ids that are held answers {len(held)} of them"
        handles = store.get_many([held[name] for name in names])
        wrong = [at for at, handle in enumerate(handles) if number_of(handle) != at]
        assert not wrong, f"{len(wrong)} of 1000 ids read another's bytes, first {names[wrong[0]]}"
        for handle in handles:
            handle.close()
        store.free([held[name] for name in names[::2]])
        odd = store.lookup(names).keys() ^ set(names[1::2])
        assert not odd, f"after a free of 500 of 1000 ids, lookup is wrong about {len(odd)}"

    def test_names_choose_the_tensors_that_are_read(self, store: Store) -> None:
        tensors = {name: any_bits("float32", 2) for name in ("hidden.1", "hidden.10", "z")}
        ref = store.put(StoreItem("a", tensors, 2))
        for names in (["z", "hidden.1"], ["hidden.10"], []):
            with store.get(ref, names=names) as handle:
                require_same(handle.tensors, {name: tensors[name] for name in names})
        with refused("a tensor that the sample lacks", "has no tensor 'hidden'"):
            store.get(ref, names=["hidden"])

    def test_a_sample_twice_in_one_put_is_refused(self, store: Store) -> None:
        with refused("one id twice in a put", "'a' occurs twice"):
            store.put_many([numbered("a", 1), numbered("a", 2)])
        require_stats(store, samples=0, nbytes=0)

    def test_a_put_again_supersedes_and_the_old_ref_raises(self, store: Store) -> None:
        older, old, new = (store.put(numbered("a", number)) for number in (1, 2, 2))
        require_gone(store, older)
        require_gone(store, old)
        assert number_in(store, new) == 2
        require_held(store, a=new)
        require_stats(store, samples=1)

    def test_an_open_handle_keeps_its_bytes_whatever_comes_later(self, open_store: Open) -> None:
        """Views of a page, a mapping or a buffer that the store then uses for something else."""
        store = open_store()
        items = [StoreItem(name, {"x": any_bits("int64", *s)}, 9) for name, s in KEPT.items()]
        refs = store.put_many(items)
        handles = store.get_many(refs)
        store.free(refs[:1])
        for number in range(24):
            new = store.put(numbered(["b", "d", "e", "f"][number % 4], number, 1100))
            assert number_in(store, new) == number
            if number % 3 == 0:
                store.free([new])
        for way in ("later puts", "the store was closed"):
            for handle, item in zip(handles, items, strict=True):
                require_same(handle.tensors, item.tensors, f" after {way}")
            store.close()
        for handle in handles:
            handle.close()
            handle.close()
        again = open_store()
        assert number_in(again, again.put(numbered("g", 7))) == 7

    @pytest.mark.parametrize("way", ["free", "abort"])
    def test_get_after_free_raises_and_free_twice_is_harmless(self, store: Store, way: str) -> None:
        first, other, last = (store.put(numbered(name, 1)) for name in "abc")  # of equal bytes
        for ref in (first, last, first):
            drop(store, ref, way)
            require_gone(store, ref)
        store.abort("never put")
        require_held(store, a=None, b=other, c=None)
        require_there(store, [other], "samples of equal bytes were dropped, and one that is held")
        store.free(iter([first, first, other]))
        require_stats(store, samples=0, nbytes=0)

    def test_free_never_touches_a_newer_generation(self, store: Store) -> None:
        old = store.put(numbered("a", 1))
        new = store.put(numbered("a", 2))
        store.free([old])
        require_held(store, a=new)
        store.free([new])
        require_held(store, a=None)
        newest = store.put(numbered("a", 1))
        assert newest.generation != old.generation, "what is put again has its old generation"
        store.free([new, old])
        assert number_in(store, newest) == 1

    @pytest.mark.parametrize("way", ["free", "abort"])
    def test_bytes_stay_until_the_last_open_handle_closes(self, store: Store, way: str) -> None:
        ref = store.put(numbered("a", 1))
        first, second = store.get(ref), store.get(ref)
        require_stats(store, open_handles=2)
        drop(store, ref, way)
        require_gone(store, ref)
        newer = store.put(numbered("a", 2))
        first.close()
        first.close()
        require_stats(store, open_handles=1)
        assert number_of(second) == 1
        second.close()
        require_stats(store, open_handles=0, nbytes=newer.nbytes)
        assert number_in(store, newer) == 2

    def test_a_get_of_several_opens_all_or_none(self, store: Store) -> None:
        held, gone = store.put_many([numbered("a", 1), numbered("b", 2)])
        store.free([gone])
        with refused("a get of two, one of them freed", "'b'"):
            store.get_many([held, gone])
        require_stats(store, open_handles=0)
        store.free([held])
        require_stats(store, samples=0, nbytes=0)

    def test_a_put_that_fails_leaves_what_was_held(self, store: Store) -> None:
        """Its second sample has no bytes, so the first one must not come to stay either."""
        old = store.put(numbered("a", 1))
        broken = StoreItem("b", {"x": torch.empty(3, device="meta")}, 3)
        with suppress(Exception):  # which one is the store's choice
            store.put_many([numbered("a", 2), numbered("c", 3), broken])
        require_held(store, a=old, b=None, c=None)
        require_stats(store, samples=1, nbytes=old.nbytes)
        assert number_in(store, old) == 1
        assert number_in(store, store.put(numbered("a", 4))) == 4

    def test_a_closed_store_says_so_and_its_own_uri_opens_it_again(self, open_store: Open) -> None:
        store = open_store()
        if "shared" in self.capabilities:
            store = open_store(store.uri)  # one that is not durable goes with who opened it first
        ref = store.put(numbered("a", 1))
        store.close()
        store.close()
        calls: dict[str, Any] = {"put": numbered("b", 1), "get": ref, "lookup": ["a"], "abort": "a"}
        calls |= {"put_many": [numbered("b", 1)], "get_many": [ref], "free": [ref], "stats": None}
        if "durable" in self.capabilities:
            calls |= {"read_manifest": None, "write_manifest": {"a": 1}}
        for method, argument in calls.items():
            with refused(f"{method} of a closed store", "closed"):
                getattr(store, method)(*[argument][: argument is not None])
        again = open_store(store.uri)
        assert again.uri == store.uri, f"{store.uri} opens {again.uri}"
        assert number_in(again, again.put(numbered("c", 3))) == 3

    def test_its_own_uri_opens_it_from_any_folder_whatever_its_path(
        self, open_store: Open, store_uri: str, elsewhere: "Elsewhere", monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Producers work in a folder of their own. Where its URI names a path, this one is relative."""
        scheme, _, rest = store_uri.partition(":")
        mark, query = rest.partition("?")[1:]
        path = path_of(store_uri)
        if path is None:
            pytest.skip("its URI names no path")
        (path.parent / ODD).mkdir(parents=True)
        monkeypatch.chdir(path.parent)
        store = open_store(f"{scheme}:{quote(f'{ODD}/{path.name}')}{mark}{query}")
        ref = store.put(numbered("a", 1))
        monkeypatch.chdir("/")
        shared, durable = (word in self.capabilities for word in ("shared", "durable"))
        if not shared:
            store.close()
        again = open_store(store.uri)
        assert again.uri == store.uri, f"{store.uri} opens {again.uri}"
        if not (shared or durable):
            ref = again.put(numbered("a", 1))
        assert again.lookup(["a"]) == {"a": ref}, f"{store.uri} opens another store than was put to"
        if shared:
            found = elsewhere.visit(self.plugin, store.uri, ["number", ref])
            assert found == [1], f"another process does not find in {store.uri} what was put"

    def test_a_full_store_pushes_back_and_recovers(
        self, open_store: Open, store_uri: str, elsewhere: "Elsewhere"
    ) -> None:
        """All or none; what is held stays readable; after a free the same put succeeds.

        Where processes share a store, another one frees: a trainer does what a producer waits for.
        Where they share a path, half of what fills the store is what another one put.
        """
        nbytes = BIG * 8
        limit, shared = int(2.5 * nbytes), "shared" in self.capabilities
        store = open_store(self.with_limit(store_uri, limit))
        refs = [store.put(numbered(name, 5, BIG)) for name in ("a", "b")]
        if shared and path_of(store_uri):
            refs[1:] = elsewhere.visit(self.plugin, store.uri, ["put", "b", 5, BIG])
        pair = [numbered(name, 0, BIG) for name in ("c", "d")]
        for _ in range(2):
            with refused("128 KiB put to the 32 KiB that are left", kind=StoreFull) as caught:
                store.put_many(pair)
            full = cast(StoreFull, caught.value)
            assert full.needed == 2 * nbytes, f"StoreFull says needed={full.needed}"
            most = limit - 2 * nbytes  # a store may spend some on more than tensors
            assert 0 <= full.free <= most, f"StoreFull says free={full.free}, all puts leave {most}"
            assert all(word in str(full) for word in ("needed: 128.0 KiB", "free: "))
        require_held(store, a=refs[0], b=refs[1], c=None, d=None)
        require_stats(store, samples=2, nbytes=2 * nbytes, limit_bytes=limit)
        assert number_in(store, refs[1]) == 5
        if shared:
            elsewhere.visit(self.plugin, store.uri, *(["free", ref] for ref in refs))
        else:
            store.free(refs)
        try:
            assert len(store.put_many(pair)) == 2
        except StoreFull as error:
            pytest.fail(f"all that it held was freed, and the same put is refused: {error}")
        with refused("one put of twice the limit", kind=DraftcoreError):
            store.put(numbered("e", 1, 5 * BIG))
        if path := path_of(store_uri):
            raised = elsewhere.submit("fill", self.plugin, store_uri, str(path.parent)).result()
            assert raised in ("", "StoreFull"), f"a put to a full disk raises {raised}"

    @pytest.mark.parametrize("way", ["free", "abort", "put"])
    def test_bytes_that_are_still_read_count_against_the_limit(
        self, open_store: Open, store_uri: str, way: str
    ) -> None:
        store = open_store(self.with_limit(store_uri, int(2.5 * BIG * 8)))
        ref = store.put(numbered("a", 1, BIG))
        handles = [store.get(ref), store.get(ref)]
        if way != "put":
            drop(store, ref, way)
        newer = store.put(numbered("a", 2, BIG))
        size = format_size(BIG * 8)
        what = f"{size} are held, {size} are still being read, and a put of {size} to 160 KiB"
        for handle in handles:  # the first that closes is not the last that reads
            with refused(what, kind=StoreFull):
                store.put(numbered("b", 3, BIG))
            require_stats(store, nbytes=2 * BIG * 8)
            assert number_of(handle) == 1
            handle.close()
        store.free([newer])
        assert len(store.put_many([numbered(name, 3, BIG) for name in "bc"])) == 2

    def test_samples_that_come_and_go_leave_nothing_behind(self, store: Store) -> None:
        def cycle(count: int) -> None:
            for number in range(count):
                ref = store.put(numbered("a", number, BIG))
                assert number_in(store, ref) == number
                if number % 2:
                    store.free([ref])

        cycle(8)
        files = len(os.listdir("/proc/self/fd"))
        with watched_bytes(torch.device("cpu")) as held:
            cycle(40)
            kept = held() // (BIG * 8)
        assert kept < 20, f"the tensors of {kept} samples are in memory after 40 came and went"
        more = len(os.listdir("/proc/self/fd")) - files
        assert more < 20, f"{more} more files are open after 40 samples came and went"

    def test_threads_put_get_and_free_side_by_side(self, store: Store) -> None:
        def work(thread: int) -> None:
            for round_ in range(15):
                names = [f"{thread}/{member}" for member in range(3)]
                refs = store.put_many([numbered(name, round_) for name in names])
                handles = store.get_many(refs)
                assert {number_of(handle) for handle in handles} == {round_}
                if round_ % 3 == 0:
                    store.free(refs)
                for handle in handles:
                    handle.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        require_stats(store, samples=12, open_handles=0)

    def test_threads_that_put_one_id_leave_one_of_their_puts(self, store: Store) -> None:
        with ThreadPoolExecutor(4) as pool:
            refs = list(pool.map(lambda number: store.put(numbered("a", number)), range(20)))
        assert len({ref.generation for ref in refs}) == 20, "several puts have one generation"
        held = store.lookup(["a"]).get("a")
        assert held in refs, f"lookup answers {held}, which no put returned"
        assert number_in(store, held) == refs.index(held)
        for ref in refs:
            if ref != held:
                require_gone(store, ref)
        require_stats(store, samples=1)
        store.free([held])
        require_held(store, a=None)

    def test_an_old_ref_never_reads_what_a_restarted_process_put(
        self, store_uri: str, elsewhere: "Elsewhere"
    ) -> None:
        (old,) = elsewhere.visit(self.plugin, store_uri, ["put", "a", 1])
        steps = ["put", "a", 2], ["number", old], ["abort", "a"], ["put", "a", 1]
        new, found, _, again = elsewhere.visit(self.plugin, store_uri, *steps)
        drawn = new.generation, again.generation
        assert old.generation not in drawn, f"two processes drew {old.generation}"
        assert found is None, f"a ref of number 1 reads number {found}, which a later process put"

    @pytest.mark.usefixtures("shared")
    def test_two_processes_see_each_others_samples(
        self, open_store: Open, elsewhere: "Elsewhere"
    ) -> None:
        writer = open_store()
        items = [numbered(name, 10) for name in ("kept", "freed", "gone")]
        kept, freed, gone, ours = writer.put_many([*items, numbered("ours", 11)])
        reader = open_store(writer.uri)  # before the other process writes
        require_held(reader, kept=kept, freed=freed, ours=ours, theirs=None)
        steps = ["free", freed], ["number", ours], ["put", "theirs", 22], ["put", "ours", 12]
        *_, read, theirs, newer = elsewhere.visit(self.plugin, reader.uri, ["free", gone], *steps)
        assert read == 11, f"who opens {reader.uri} cannot read what {writer.uri} put"
        for store in (writer, reader):
            require_gone(store, freed)  # before what looks at all
            require_held(store, kept=kept, theirs=theirs, ours=newer)
            require_stats(store, samples=3)
            assert number_in(store, theirs) == 22
            require_gone(store, ours)
        handle = reader.get(newer)
        _, other = elsewhere.visit(self.plugin, reader.uri, ["free", newer], ["put", "other", 13])
        assert number_of(handle) == 12, "another process freed what is read here"
        handle.close()
        for store in (writer, reader):
            require_held(store, kept=kept, theirs=theirs, other=other, ours=None)
            require_gone(store, newer)
            require_stats(store, samples=3)

    @pytest.mark.usefixtures("shared")
    def test_what_another_process_puts_meanwhile_is_read_whole(
        self, open_store: Open, elsewhere: "Elsewhere"
    ) -> None:
        """Both put: each waits for the other, or need not."""
        store, mine = open_store(), 0
        store.put(numbered("a", 0, 1 << 16))
        putting = elsewhere.submit("put_again", self.plugin, store.uri, 25)
        numbers = set[int]()
        while not putting.done():
            mine += 1
            store.put(numbered("b", mine, 1 << 16))
            reader = open_store(store.uri)
            for one in (store, reader):
                held = one.lookup(["a"]).get("a")
                assert held is not None, "lookup finds nothing while 'a' is put again elsewhere"
                with suppress(StoreError):  # superseded since
                    numbers.add(number_in(one, held))
            reader.close()
        putting.result()
        last = store.lookup(["a", "b"])
        assert [number_in(store, last[name]) for name in "ab"] == [25, mine]
        assert numbers <= set(range(26))

    @pytest.mark.usefixtures("durable")
    def test_a_reopened_store_holds_what_was_put_and_not_what_was_freed(
        self, open_store: Open, store_uri: str
    ) -> None:
        store = open_store()
        refs = store.put_many([numbered("a", 1), numbered("b", 2, BIG)])
        store.put(numbered("c", 3))
        newer = store.put(numbered("c", 4))
        store.free(refs[:1])
        store.close()
        again = open_store(store.uri)
        require_held(again, a=None, b=refs[1], c=newer)
        require_stats(again, samples=2)
        require_gone(again, refs[0])
        assert number_in(again, newer) == 4
        again.free([refs[0], newer])
        again.close()
        last = open_store(self.with_limit(store_uri, int(1.5 * BIG * 8)))
        require_held(last, a=None, b=refs[1], c=None)
        with refused("what it held when it was opened fills the store, and a put", kind=StoreFull):
            last.put(numbered("d", 5, BIG))
        last.free(refs)
        require_stats(last, samples=0, nbytes=0)

    @pytest.mark.usefixtures("durable")
    def test_the_manifest_is_replaced_as_a_whole_and_outlives_the_samples(
        self, open_store: Open, elsewhere: "Elsewhere"
    ) -> None:
        store = cast(DurableStore, open_store())
        assert store.read_manifest() is None, "nothing was written, and the manifest is not None"
        ref = store.put(numbered("a", 1))
        store.write_manifest({"fingerprint": "f", "lengths": [3, 4], "complete": False})
        cut = {"batch": 4, "rows": [[number] for number in range(30_000)]}
        written = {"fingerprint": "ü", "complete": True, "cut": cut}
        store.write_manifest(written)
        assert store.read_manifest() == written, "the manifest is not what was written last"
        store.free([ref])
        if "shared" not in self.capabilities:
            store.close()
        found, _ = elsewhere.visit(self.plugin, store.uri, ["manifest"], ["replace", {"a": 1}])
        assert found == written, "another process reads another manifest"
        if "shared" in self.capabilities:
            now = store.read_manifest()
            said = "another process wrote a manifest, and who wrote before has"
            assert now == {"a": 1}, f"{said} {now}"
        store.close()
        last = cast(DurableStore, open_store()).read_manifest()
        assert last == {"a": 1}, f"another process wrote the manifest, and it is {last}"

    @pytest.mark.parametrize("moment", ["time", "line"])
    def test_a_killed_put_is_there_as_a_whole_or_not_at_all(
        self, open_store: Open, store_uri: str, elsewhere: "Elsewhere", moment: str
    ) -> None:
        """Killed at moments that are spread over a put, and at lines of the store's code."""
        uri = store_uri
        if "shared" in self.capabilities:
            uri = open_store().uri  # a store that is not durable goes with the last process
        elif "durable" not in self.capabilities:
            pytest.skip("nothing of the store is seen by another process")
        returned = elsewhere.submit("put_and_die", self.plugin, uri, moment).result()
        store = open_store(uri)
        for number, acknowledged in enumerate(returned):
            new = [item.feature_id for item in killed_items(number, moment)]
            held = store.lookup(new)
            when = f"after {len(returned) - 2} kills, of put {number}"
            assert "again" in held, f"{when} 'again' is not held, neither the new nor the old"
            some = f"{len(held) - 1} of {len(new) - 1} new samples are held"
            assert len(held) in (1, len(new)), f"{when} {some}: a put is all or none"
            assert len(held) > 1 or not acknowledged, f"{when} nothing is held, and it returned"
            require_there(store, held.values(), f"{when} the index names a sample whose data")
        puts = (killed_items(number, moment) for number in range(len(returned)))
        held = store.lookup([item.feature_id for put in puts for item in put])
        require_stats(store, samples=len(held))
        store.free(held.values())
        require_stats(store, samples=0)

    @pytest.mark.usefixtures("durable")
    def test_altered_bytes_raise_and_name_the_sample(self, open_store: Open) -> None:
        """Also where they were read before: a run reads its features in every epoch."""
        store = open_store()
        known = [int.from_bytes(word, sys.byteorder) for word in (b"in small", b"in large")]
        refs = [store.put(numbered("a", known[0])), store.put(numbered("large", known[1], 1 << 18))]
        assert [number_in(store, ref) for ref in refs] == known
        self.alter(store.uri)
        for when in (" since they were read", ""):
            for ref in refs:
                name = f"sample {ref.feature_id!r}"
                with refused(f"a get of bytes of {name} that were altered{when}", name):
                    store.get(ref)
            store.close()
            store = open_store()


KEPT = {"a": (100, 11), "b": (1, 1100), "c": (3,)}  # shapes


def open_through(plugin: str, uri: str) -> FeatureStore:
    """Open a store through its plugin's hook, as a run does."""
    store: FeatureStore = opened(plugin, "store", uri.partition(":")[0], {}, uri=uri)
    return store


def any_bits(dtype: str, *shape: int) -> Tensor:
    """Return a tensor of random bit patterns, whatever they mean in this type."""
    generator = torch.Generator().manual_seed(sum(shape))
    kind: torch.dtype = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.randint(2, shape, generator=generator, dtype=torch.uint8).bool()
    size = (torch.Size(shape).numel() * kind.itemsize,)
    flat = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return flat.view(kind).view(shape)


def numbered(feature_id: str, number: int, numbers: int = 16) -> StoreItem:
    """Return a sample that is filled with a number, which its provenance says as well."""
    tensor = torch.full((numbers,), number, dtype=torch.int64)
    return StoreItem(feature_id, {"x": tensor}, numbers, f"run {number}")


def number_of(handle: Handle) -> int:
    """Return what a sample is filled with, which must be what its ref says."""
    found, said = set(handle.tensors["x"].tolist()), handle.ref.provenance
    assert len(found) == 1, f"sample {handle.ref.feature_id!r} has bytes of several puts: {found}"
    number = int(found.pop())
    assert said == f"run {number}", f"a ref of {said} reads the bytes of run {number}"
    return number


def number_in(store: FeatureStore, ref: SampleRef) -> int:
    with store.get(ref) as handle:
        return number_of(handle)


def require_there(store: FeatureStore, refs: Iterable[SampleRef], what: str) -> None:
    try:
        for handle in store.get_many(list(refs)):
            number_of(handle)
            handle.close()
    except Exception as error:
        pytest.fail(f"{what} is not there: {error}")


def require_same(found: Tensors, expected: Tensors, when: str = "") -> None:
    """Compare names, types, shapes and bits."""
    assert found.keys() == expected.keys(), f"{sorted(expected)} were put, {sorted(found)} came"
    for name, tensor in expected.items():
        other = found[name]
        kinds = [f"{one.dtype} {list(one.shape)}" for one in (tensor, other)]
        assert kinds[0] == kinds[1], f"{name}: {kinds[0]} was put, {kinds[1]} came back{when}"
        differs = (bits(other) != bits(tensor)).any(-1).view(tensor.shape)
        first = differs.nonzero()[:1].flatten().tolist()
        count = f"{int(differs.sum())} of {tensor.numel()} values"
        assert not differs.any(), f"{name}: {count} differ{when}, first at {first}"


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(tensor.numel(), tensor.element_size())


def require_stats(store: FeatureStore, **expected: int) -> None:
    stats = store.stats()
    for name, value in expected.items():
        found = getattr(stats, name)
        assert found == value, f"stats() says {name}={found}, it is {value}"


def require_manifest(store: FeatureStore, puts: int) -> None:
    """Demand that a durable store has one of the manifests that were written beside some puts."""
    if hasattr(store, "read_manifest"):
        try:
            found = store.read_manifest()
        except Exception as error:
            pytest.fail(f"the manifest cannot be read after a kill: {error!r}")
        written = [None, *({"put": number} for number in range(puts))]
        assert found in written, f"the manifest is {found} after a kill, which nobody wrote"


def require_held(store: FeatureStore, **expected: SampleRef | None) -> None:
    """Compare what lookup answers for some ids; None where nothing is held."""
    found = store.lookup(list(expected))
    for name, ref in expected.items():
        require_ref(found.get(name), ref, f"lookup of {name[:50]!r}")
    odd = [name[:50] for name in found if expected.get(name) is None]
    assert not odd, f"lookup answers {odd}, which are not held, or were not asked for"


def require_ref(found: SampleRef | None, ref: SampleRef | None, of: str) -> None:
    if found and ref:
        told, true = vars(found), vars(ref)
        odd = (key for key in true if told[key] != true[key])
        differ = [f"{key} {told[key]!r}, not {true[key]!r}" for key in odd]
        assert not differ, f"{of} answers {'; '.join(differ)}"
    names = [one.provenance if one else "nothing" for one in (found, ref)]
    assert found == ref, f"{of} answers {names[0]}, and {names[1]} is held"


def require_gone(store: FeatureStore, ref: SampleRef) -> None:
    with refused("a get of a ref that was freed or superseded", repr(ref.feature_id)):
        store.get(ref)


@contextmanager
def refused(
    what: str, match: str | None = None, kind: type[DraftcoreError] = StoreError
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Demand an error, or say what was accepted."""
    try:
        with pytest.raises(kind, match=match) as caught:
            yield caught
    except pytest.fail.Exception:
        pytest.fail(f"{what} was accepted; it raises {kind.__name__}")


def drop(store: FeatureStore, ref: SampleRef, way: str) -> None:
    store.free([ref]) if way == "free" else store.abort(ref.feature_id)


# ---------------------------------------------------------------- what other processes do


class Elsewhere:
    """Another process, which calls functions of this module, each in a fork of its own.

    It has imported what they need, once for all tests of a run, and works in the folder /.
    """

    def __init__(self) -> None:
        program = "from draftcore_sdk import stores; stores.answer()"
        command, pipe, env = [sys.executable, "-c", program], subprocess.PIPE, child_environment()
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self._calls = ThreadPoolExecutor(1)
        atexit.register(self._process.communicate)

    def submit(self, function: str, *arguments: Any) -> "Future[Any]":
        path = [os.path.abspath(one) for one in sys.path]
        return self._calls.submit(self._call, json.dumps([path, function, arguments]))

    def visit(self, plugin: str, uri: str, *steps: Sequence[Any]) -> list[Any]:
        """Open a store, take some of the `STEPS` and close it; return what each one said."""
        told = [[one.to_json() if isinstance(one, SampleRef) else one for one in s] for s in steps]
        found = zip(self.submit("visit", plugin, uri, told).result(), steps, strict=True)
        return [SampleRef.from_json(one) if step[0] == "put" else one for one, step in found]

    def _call(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return said(json.loads(self._process.stdout.readline()))


@functools.cache
def _elsewhere(network: str) -> Elsewhere:
    return Elsewhere()


def answer() -> None:
    """Call what each line of the input names, in a fork; print what it returned or why it ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what plugins print is no answer
    os.chdir("/")
    for line in sys.stdin:
        sys.path[:], function, arguments = json.loads(line)
        print(json.dumps(in_fork(function, *arguments)), file=answers, flush=True)


def in_fork(function: str, *arguments: Any) -> dict[str, Any]:
    """Return what a function of this module says in a process of its own, or why it said nothing."""
    read, write = os.pipe()
    if not os.fork():
        Limit().start(PATIENCE)
        try:
            told = {"said": globals()[function](*arguments)}
        except BaseException as error:
            traceback.print_exc()
            told = {"failed": "".join(traceback.format_exception_only(error))}
        os.write(write, json.dumps(told).encode())
        os._exit(0)
    os.close(write)
    with open(read) as answers:
        text = answers.read()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    found: dict[str, Any] = json.loads(text or "{}")
    return found or {"failed": f"{function} ended with status {status}", "status": status}


def said(answer: Mapping[str, Any]) -> Any:
    """Return what a function said in another process."""
    assert "failed" not in answer, f"in another process: {answer['failed']}"
    return answer["said"]


def visit(plugin: str, uri: str, steps: Sequence[Sequence[Any]]) -> list[Any]:
    store = open_through(plugin, uri)
    answers = [STEPS[name](store, *arguments) for name, *arguments in steps]
    store.close()
    return answers


def number_or_none(store: FeatureStore, ref: Mapping[str, Any]) -> int | None:
    with suppress(StoreError), store.get(SampleRef.from_json(ref)) as handle:
        return int(handle.tensors["x"][0])
    return None


STEPS: Mapping[str, Callable[..., Any]] = {
    "put": lambda store, *of: store.put(numbered(*of)).to_json(), "number": number_or_none,
    "abort": lambda store, name: store.abort(name), "manifest": lambda store: store.read_manifest(),
    "free": lambda store, ref: store.free([SampleRef.from_json(ref)]),
    "replace": lambda store, data: store.write_manifest(data),
}  # fmt: skip


def fill(plugin: str, uri: str, folder: str) -> str:
    """Put until a small disk is full, and return what the last put raised.

    Or '' where this user cannot mount one, and for a store that claims its room at once.
    """
    refs = list[SampleRef]()
    try:
        store = open_through(plugin, uri) if mount_small(Path(folder), 1 << 20) else None
        while store is not None and len(refs) < 64:
            refs += store.put_many([numbered(f"{len(refs)}/{at}", 1, BIG // 2) for at in range(2)])
    except Exception as error:
        if refs and store is not None:
            require_there(store, refs, "what was put before the disk was full")
            require_stats(store, samples=len(refs))
            return type(error).__name__
    return ""


def mount_small(folder: Path, nbytes: int) -> bool:
    """Mount a file system of so many bytes that this process alone, a fork, sees; say whether it may."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        return False
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    try:
        for file, text in maps.items():
            Path("/proc/self", file).write_text(text)
    except OSError:
        return False
    size = f"size={nbytes}".encode()
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, size) == 0)


def put_again(plugin: str, uri: str, times: int) -> None:
    store = open_through(plugin, uri)
    for number in range(1, times + 1):
        store.put(numbered("a", number, 1 << 16))
    store.close()


def killed_items(number: int, moment: str) -> list[StoreItem]:
    """Return the samples of a put: many where it is killed at a line, large ones at a time."""
    count, numbers = (MANY, 16) if moment == "line" else (2, 1 << 18)
    names = [f"killed/{number}/{at}" for at in range(count)]
    return [numbered(name, number, numbers) for name in [names[0], "again", *names[1:]]]


def put_and_die(plugin: str, uri: str, moment: str) -> list[bool]:
    """Put twice to the end, then in processes that are killed before it; say which puts returned.

    They are killed at a `time` after the put began, or at a `line` of the store's own code.
    """
    for number in range(2):
        moments, modules = said(in_fork("put_until", plugin, uri, number, moment, 1e9))
        for module in modules:  # which those who are killed then need not import
            with suppress(Exception):
                import_module(module)
    returned, limit = [True, True], Limit()
    for last in moments[:: math.ceil(len(moments) / KILLS)]:
        limit.start(PATIENCE)  # for each kill
        found = in_fork("put_until", plugin, uri, len(returned), moment, last)
        kills = len(returned) - 2
        assert found.keys() != {"failed"}, f"a put after {kills} kills: {found['failed']}"
        returned.append("said" in found)
    return returned


def put_until(
    plugin: str, uri: str, number: int, moment: str, last: float
) -> tuple[list[float], list[str]]:
    """Put until a time or a line, where this process ends; return moments before the end.

    And the modules that were needed.
    """
    store = open_through(plugin, uri)
    require_manifest(store, number)
    items = killed_items(number, moment)
    lines, began = Lines(store, last), time.monotonic()
    if moment == "line":
        sys.settrace(lines)
    else:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, min(last, PATIENCE))
    store.put_many(items)
    if moment == "line" and hasattr(store, "write_manifest"):
        store.write_manifest({"put": number})
    sys.settrace(None)
    whole = time.monotonic() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    return lines.moments or [whole * (at + 0.5) / 8 for at in range(8)], list(sys.modules)


class Lines:
    """Ends the process before a line of the store's own code, by the number of lines until then.

    `moments` are where a line comes for the first time, or for the second: as in a loop.
    """

    def __init__(self, store: FeatureStore, last: float) -> None:
        modules = {kind.__module__ for kind in type(store).__mro__}
        own = [one for one in modules if one.partition(".")[0] not in sys.stdlib_module_names]
        self.common = BaseStore.__init__.__code__.co_filename
        self.folders = {os.path.dirname(str(sys.modules[module].__file__)) for module in own}
        self.seen, self.last, self.moments = Counter[tuple[CodeType, int]](), last, list[float]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Lines | None":
        file = frame.f_code.co_filename
        if file == self.common or os.path.dirname(file) not in self.folders:
            return None
        place = frame.f_code, frame.f_lineno
        if event == "line":
            self.seen[place] += 1
            if self.seen[place] <= 2:
                self.moments.append(self.seen.total())
            if self.seen.total() > self.last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self
