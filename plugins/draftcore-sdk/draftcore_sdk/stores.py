"""What every feature store must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `store_uri` where a store needs more than a folder. A
durable store also says how to `alter` what it stored, and one whose limit is not the URI option
`max_bytes` overrides `with_limit`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftcore.contracts.store import FeatureStore, SampleRef, StoreError, StoreFull, StoreItem
from draftcore_sdk.suite import Suite, child_environment, hooks_of, offer_of, options_of

OpenStore = Callable[..., FeatureStore]
DTYPES = ["bfloat16", "float16", "float32", "int64", "bool"]
ODD_IDS = ["a/b/../c", "/abs", "ünïcødé 漢字 🙂", "with space\nand line", "x" * 3000, "..", ""]


class StoreSuite(Suite):
    """The behaviour of a store, opened through its plugin."""

    # ------------------------------------------------------------ what a subclass says

    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        """The URI of an empty store; by default in a fresh folder."""
        return f"{offer_of(self.plugin, 'store', self.name).name}:{tmp_path / 'store'}"

    def with_limit(self, uri: str, nbytes: int) -> str:
        """Return the URI of a store that holds at most `nbytes`."""
        return f"{uri}{'&' if '?' in uri else '?'}max_bytes={nbytes}"

    def alter(self, uri: str) -> None:
        """Change a byte of every tensor that a durable store holds, behind its back."""
        raise NotImplementedError("override alter: a durable store must notice altered bytes")

    def opening(self, uri: str) -> tuple[str, str, str]:
        """What another process needs to open the same store."""
        return self.plugin, uri, json.dumps(dict(self.options))

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def open_store(self, store_uri: str) -> Iterator[OpenStore]:
        """Open the store, or another URI, any number of times; all are closed at the end."""
        opened: list[FeatureStore] = []

        def opener(uri: str = store_uri) -> FeatureStore:
            opened.append(open_through(self.plugin, uri, self.options))
            return opened[-1]

        yield opener
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: OpenStore) -> FeatureStore:
        return open_store()

    @pytest.fixture
    def shared(self) -> None:
        self.require("shared", "to be reached by several processes")

    @pytest.fixture
    def durable(self) -> None:
        self.require("durable", "to outlive its processes")

    def require(self, capability: str, meaning: str) -> None:
        if capability not in offer_of(self.plugin, "store", self.name).capabilities:
            pytest.skip(f"the store does not claim {meaning} (capability {capability})")

    # ------------------------------------------------------------ bits

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_round_trip_is_bit_exact(self, store: FeatureStore, dtype: str) -> None:
        """Every bit pattern comes back, also NaN payloads; and views, empty and scalar tensors."""
        batch = any_bits(dtype, 3, 8, 6)
        tensors = {
            "rows of a padded batch": batch[1, :5],
            "transposed": batch[0].T,
            "strided": batch[:, ::2, 1::2],
            "expanded": batch[:1, :1, :1].expand(4, 2, 3),
            "odd": any_bits(dtype, 33, 7),
            "flat": any_bits(dtype, 5),
            "empty": any_bits(dtype, 0, 16),
            "scalar": any_bits(dtype),
        }
        with store.get(store.put(StoreItem("a", tensors, 5))) as handle:
            require_same(handle.tensors, tensors)
            assert all(tensor.is_contiguous() for tensor in handle.tensors.values())

    def test_tensors_of_several_types_go_together(self, store: FeatureStore) -> None:
        """Odd sizes of small types must not put the others out of alignment."""
        tensors = {dtype: any_bits(dtype, 3, 5) for dtype in sorted(DTYPES)}
        with store.get(store.put(StoreItem("a", tensors, 3))) as handle:
            require_same(handle.tensors, tensors)

    def test_a_tensor_with_gradient_is_stored_without(self, store: FeatureStore) -> None:
        ref = store.put(StoreItem("a", {"x": torch.ones(2, requires_grad=True) * 2}, 2))
        with store.get(ref) as handle:
            assert not handle.tensors["x"].requires_grad
            assert handle.tensors["x"].tolist() == [2, 2]

    def test_later_edits_by_the_producer_do_not_reach_the_store(self, store: FeatureStore) -> None:
        buffer = torch.zeros(4, 3)
        ref = store.put(StoreItem("a", {"x": buffer}, 4))
        buffer.fill_(9)
        with store.get(ref) as handle:
            assert handle.tensors["x"].sum() == 0

    # ------------------------------------------------------------ refs

    def test_a_ref_describes_its_sample(self, store: FeatureStore) -> None:
        item = StoreItem(
            "a", {"x": any_bits("bfloat16", 6, 4), "m": any_bits("bool", 6)}, 6, "run 1"
        )
        ref = store.put(item)
        assert (ref.feature_id, ref.tokens, ref.nbytes) == ("a", 6, 6 * 4 * 2 + 6)
        assert ref.provenance == "run 1"
        shapes = {spec.name: (spec.shape, spec.dtype) for spec in ref.tensors}
        assert shapes == {"x": ((6, 4), "bfloat16"), "m": ((6,), "bool")}
        assert SampleRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref

    def test_refs_come_in_the_order_of_the_put(self, store: FeatureStore) -> None:
        items = [numbered(f"s{number}", number) for number in (3, 1, 2)]
        refs = store.put_many(items)
        assert [ref.feature_id for ref in refs] == ["s3", "s1", "s2"]
        handles = store.get_many([refs[2], refs[0], refs[2]])
        assert [int(handle.tensors["x"][0]) for handle in handles] == [2, 3, 2]
        for handle in handles:
            handle.close()
        assert store.put_many([]) == ()
        assert store.get_many([]) == ()

    def test_lookup_finds_what_is_held_and_leaves_out_the_rest(self, store: FeatureStore) -> None:
        refs = store.put_many([numbered("a", 1), numbered("b", 2)])
        assert store.lookup(["b", "absent", "a"]) == {"a": refs[0], "b": refs[1]}

    def test_odd_ids_are_ids_like_others(self, store: FeatureStore) -> None:
        refs = store.put_many([numbered(name, at) for at, name in enumerate(ODD_IDS)])
        assert store.lookup(ODD_IDS) == dict(zip(ODD_IDS, refs, strict=True))
        for at, ref in enumerate(refs):
            with store.get(ref) as handle:
                assert int(handle.tensors["x"][0]) == at
        store.free(refs[:3])
        assert set(store.lookup(ODD_IDS)) == set(ODD_IDS[3:])

    def test_names_choose_the_tensors_that_are_read(self, store: FeatureStore) -> None:
        tensors = {name: any_bits("float32", 2) for name in ("x", "y", "z")}
        ref = store.put(StoreItem("a", tensors, 2))
        for names in (["z", "x"], ["y"], []):
            with store.get(ref, names=names) as handle:
                require_same(handle.tensors, {name: tensors[name] for name in names})
        with pytest.raises(StoreError, match="has no tensor 'hidden'"):
            store.get(ref, names=["hidden"])

    def test_a_sample_twice_in_one_put_is_refused(self, store: FeatureStore) -> None:
        with pytest.raises(StoreError, match="'a' occurs twice"):
            store.put_many([numbered("a", 1), numbered("a", 2)])
        assert store.stats().samples == 0

    # ------------------------------------------------------------ generations

    def test_a_put_again_supersedes_and_the_old_ref_raises(self, store: FeatureStore) -> None:
        old, new = store.put(numbered("a", 1)), store.put(numbered("a", 2))
        assert old.generation != new.generation
        with pytest.raises(StoreError, match="'a'"):
            store.get(old)
        with store.get(new) as handle:
            assert int(handle.tensors["x"][0]) == 2
        assert store.lookup(["a"]) == {"a": new}
        assert store.stats().samples == 1

    def test_a_read_in_progress_survives_a_put_again(self, store: FeatureStore) -> None:
        handle = store.get(store.put(numbered("a", 1)))
        new = store.put(numbered("a", 2))
        assert int(handle.tensors["x"][0]) == 1
        handle.close()
        with store.get(new) as again:
            assert int(again.tensors["x"][0]) == 2

    @pytest.mark.parametrize("way", ["free", "abort"])
    def test_get_after_free_raises_and_free_twice_is_harmless(
        self, store: FeatureStore, way: str
    ) -> None:
        ref, other = store.put_many([numbered("a", 1), numbered("b", 2)])
        for _ in range(2):
            drop(store, ref, way)
            with pytest.raises(StoreError, match="'a'"):
                store.get(ref)
        store.abort("never put")
        assert store.lookup(["a", "b"]) == {"b": other}
        store.free([ref, ref, other])
        assert (store.stats().samples, store.stats().nbytes) == (0, 0)

    def test_free_never_touches_a_newer_generation(self, store: FeatureStore) -> None:
        old = store.put(numbered("a", 1))
        new = store.put(numbered("a", 2))
        store.free([old])
        assert store.lookup(["a"]) == {"a": new}
        store.free([new])
        newest = store.put(numbered("a", 3))
        store.free([new, old])
        with store.get(newest) as handle:
            assert int(handle.tensors["x"][0]) == 3

    @pytest.mark.parametrize("way", ["free", "abort"])
    def test_bytes_stay_until_the_last_open_handle_closes(
        self, store: FeatureStore, way: str
    ) -> None:
        ref = store.put(numbered("a", 1))
        first, second = store.get(ref), store.get(ref)
        assert store.stats().open_handles == 2
        drop(store, ref, way)
        with pytest.raises(StoreError, match="'a'"):
            store.get(ref)
        newer = store.put(numbered("a", 2))
        first.close()
        first.close()
        assert int(second.tensors["x"][0]) == 1
        second.close()
        assert store.stats().open_handles == 0
        assert store.stats().nbytes == newer.nbytes
        with store.get(newer) as handle:
            assert int(handle.tensors["x"][0]) == 2

    def test_stats_count_samples_and_bytes(self, store: FeatureStore) -> None:
        assert (store.stats().samples, store.stats().nbytes) == (0, 0)
        refs = [store.put(numbered("a", 1)), store.put(numbered("b", 2, numbers=50))]
        assert store.stats().samples == 2
        assert store.stats().nbytes == sum(ref.nbytes for ref in refs)

    def test_a_closed_store_says_so(self, open_store: OpenStore) -> None:
        store = open_store()
        ref = store.put(numbered("a", 1))
        store.close()
        store.close()
        for use in (
            lambda: store.get(ref),
            lambda: store.put(numbered("b", 1)),
            lambda: store.lookup(["a"]),
        ):
            with pytest.raises(StoreError, match="closed"):
                use()

    # ------------------------------------------------------------ limits

    def test_a_full_store_pushes_back_and_recovers(
        self, open_store: OpenStore, store_uri: str
    ) -> None:
        """All or none; what is held stays readable; after a free the same put succeeds."""
        one = numbered("", 0, numbers=8192)
        nbytes = 8192 * 8
        store = open_store(self.with_limit(store_uri, int(2.5 * nbytes)))
        refs = [store.put(numbered(name, 5, numbers=8192)) for name in ("a", "b")]
        pair = [StoreItem(name, one.tensors, 1) for name in ("c", "d")]
        for _ in range(2):
            with pytest.raises(StoreFull) as caught:
                store.put_many(pair)
            assert all(word in str(caught.value) for word in ("needed: 128.0 KiB", "free: "))
        assert store.lookup(["a", "b", "c", "d"]).keys() == {"a", "b"}
        assert store.stats().nbytes == 2 * nbytes
        with store.get(refs[1]) as handle:
            assert handle.tensors["x"].sum() == 5 * 8192
        store.free(refs)
        assert len(store.put_many(pair)) == 2

    def test_bytes_that_are_still_read_count_against_the_limit(
        self, open_store: OpenStore, store_uri: str
    ) -> None:
        store = open_store(self.with_limit(store_uri, int(1.5 * 8192 * 8)))
        ref = store.put(numbered("a", 1, numbers=8192))
        handle = store.get(ref)
        store.free([ref])
        with pytest.raises(StoreFull):
            store.put(numbered("b", 2, numbers=8192))
        handle.close()
        store.put(numbered("b", 2, numbers=8192))

    # ------------------------------------------------------------ company

    def test_threads_put_get_and_free_side_by_side(self, store: FeatureStore) -> None:
        def work(thread: int) -> None:
            for round_ in range(15):
                names = [f"{thread}/{member}" for member in range(3)]
                refs = store.put_many([numbered(name, round_) for name in names])
                handles = store.get_many(refs)
                assert {int(handle.tensors["x"].sum()) for handle in handles} == {16 * round_}
                if round_ % 3 == 0:
                    store.free(refs)
                for handle in handles:
                    handle.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert store.stats().samples == 12
        assert store.stats().open_handles == 0

    @pytest.mark.usefixtures("shared")
    def test_two_processes_see_each_others_samples(
        self, open_store: OpenStore, store_uri: str
    ) -> None:
        writer = open_store()
        ours = writer.put(numbered("ours", 11))
        writer.close()
        reader = open_store()  # before the other process writes
        assert reader.lookup(["theirs"]) == {}
        done = subprocess.run(
            child_command("visit", *self.opening(store_uri), json.dumps(ours.to_json())),
            capture_output=True,
            text=True,
            timeout=120,
            env=child_environment(),
        )
        assert done.returncode == 0, done.stderr
        theirs = SampleRef.from_json(json.loads(done.stdout))
        assert reader.lookup(["theirs"]) == {"theirs": theirs}
        with reader.get(theirs) as handle:
            assert handle.tensors["x"].tolist() == [22] * 16

    @pytest.mark.usefixtures("durable")
    def test_a_reopened_store_holds_what_was_put_and_not_what_was_freed(
        self, open_store: OpenStore
    ) -> None:
        store = open_store()
        refs = store.put_many([numbered("a", 1), numbered("b", 2)])
        store.put(numbered("c", 3))
        newer = store.put(numbered("c", 4))
        store.free(refs[:1])
        store.close()
        again = open_store()
        assert again.lookup(["a", "b", "c"]) == {"b": refs[1], "c": newer}
        with again.get(newer) as handle:
            assert int(handle.tensors["x"][0]) == 4

    @pytest.mark.usefixtures("shared")
    def test_a_killed_writer_leaves_nothing_half_served(
        self, open_store: OpenStore, store_uri: str, tmp_path: Path
    ) -> None:
        """kill -9 in the midst of puts: what was acknowledged is whole, the store goes on."""
        with open(tmp_path / "errors", "w") as errors:
            child = subprocess.Popen(
                child_command("put_until_killed", *self.opening(store_uri)),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=child_environment(),
            )
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(5)]
        time.sleep(0.004)  # into the next put, which takes longer than this
        child.kill()
        acknowledged += child.communicate()[0].split()
        assert acknowledged[:5] == [f"killed/{number}" for number in range(5)], (
            tmp_path / "errors"
        ).read_text()
        store = open_store()
        held = store.lookup([f"killed/{number}" for number in range(len(acknowledged) + 5)])
        assert set(acknowledged) <= set(held)
        for feature_id, ref in held.items():
            with store.get(ref) as handle:
                require_same(handle.tensors, killed_item(int(feature_id.split("/")[1])).tensors)
        with store.get(store.put(numbered("after", 7))) as handle:
            assert int(handle.tensors["x"][0]) == 7

    @pytest.mark.usefixtures("durable")
    def test_altered_bytes_raise_and_name_the_sample(
        self, open_store: OpenStore, store_uri: str
    ) -> None:
        store = open_store()
        ref = store.put(numbered("a", 1))
        store.close()
        self.alter(store_uri)
        with pytest.raises(StoreError, match="sample 'a'"):
            open_store().get(ref)


# ---------------------------------------------------------------- pieces of the tests


def open_through(plugin: str, uri: str, data: Mapping[str, Any]) -> FeatureStore:
    """Open a store through its plugin's hook, as a run does."""
    name = uri.partition(":")[0]
    options = options_of(offer_of(plugin, "store", name), data)
    store = hooks_of(plugin).feature_store(name=name, uri=uri, options=options)
    assert store is not None, f"{plugin} answers None to feature_store(name={name!r})"
    return store


def any_bits(dtype: str, *shape: int) -> Tensor:
    """Return a tensor of random bit patterns, whatever they mean in this type."""
    generator = torch.Generator().manual_seed(sum(shape))
    kind: torch.dtype = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.randint(2, shape, generator=generator, dtype=torch.uint8).bool()
    count = torch.Size(shape).numel() * kind.itemsize
    return (
        torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(kind).view(shape)
    )


def numbered(feature_id: str, number: int, numbers: int = 16) -> StoreItem:
    return StoreItem(feature_id, {"x": torch.full((numbers,), number, dtype=torch.int64)}, numbers)


def require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert describe(found[name]) == describe(tensor), name


def describe(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def drop(store: FeatureStore, ref: SampleRef, way: str) -> None:
    if way == "free":
        store.free([ref])
    else:
        store.abort(ref.feature_id)


# ---------------------------------------------------------------- what other processes do


def child_command(function: str, *arguments: str) -> list[str]:
    """Return the command line that calls one of the functions below."""
    program = f"import sys; from draftcore_sdk import stores; stores.{function}(*sys.argv[1:])"
    return [sys.executable, "-c", program, *arguments]


def visit(plugin: str, uri: str, options: str, ref: str) -> None:
    """Read the visited process's sample, put one, and print its ref."""
    store = open_through(plugin, uri, json.loads(options))
    with store.get(SampleRef.from_json(json.loads(ref))) as handle:
        assert handle.tensors["x"].tolist() == [11] * 16
    print(json.dumps(store.put(numbered("theirs", 22)).to_json()))
    store.close()


def killed_item(number: int) -> StoreItem:
    """A sample of 4 MiB, so that a kill rarely falls between two puts."""
    return StoreItem(f"killed/{number}", {"x": torch.full((1 << 19,), number)}, 1)


def put_until_killed(plugin: str, uri: str, options: str) -> None:
    store = open_through(plugin, uri, json.loads(options))
    for number in range(10_000):
        store.put(killed_item(number))
        print(f"killed/{number}", flush=True)
