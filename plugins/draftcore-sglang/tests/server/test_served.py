"""A server that batches, chunks and caches as it likes: what it captures, refuses and stores.

Its prefix cache is on and a chunk has 16 tokens, so that whatever shortens a capture is there.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_sdk.captures import ALL, LAYERS, ROWS, Reference, batch, features_of
from draftcore_sdk.serving import Serving
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.client import Server
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture, receipt_of, request_body
from draftcore_sglang.wire import FIELD, Ask
from draftcore_shm.store import ShmStore
from torch import Tensor

from draftcore.contracts.capture import CaptureBatch, FeatureRequest
from draftcore.contracts.store import SampleRef, StoreFull, StoreItem
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.features.producer import put_batch
from draftcore.target import TransformersTarget

pytestmark = pytest.mark.sglang
LONG = [list(range(3, 103)), [7] * 41, list(range(50, 83))]
OpenCapture = Callable[..., ServerCapture]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Serving], sink: str) -> Iterator[Serving]:
    server = start_server(
        "--chunked-prefill-size=16", DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,1,2,3"
    )
    yield server
    assert server.alive


@pytest.fixture
def store(sink: str) -> Iterator[ShmStore]:
    store = ShmStore.open(sink)
    yield store
    assert store.stats().samples == 0
    store.close()


@pytest.fixture
def open_capture(server: Serving, target: TargetSpec) -> Iterator[OpenCapture]:
    opened: list[ServerCapture] = []

    def opener(
        request: FeatureRequest = ALL, target: TargetSpec = target, **options: Any
    ) -> ServerCapture:
        options = {"servers": [server.url], "patience": 30, "self_test": False} | options
        opened.append(ServerCapture(target, request, ServerOptions(**options)))
        return opened[-1]

    yield opener
    for capture in opened:
        capture.close()


def require_features(
    features: Mapping[str, Tensor], tokens: Sequence[int], reference: Reference
) -> None:
    """The largest difference to transformers was 5.4e-7 of the largest number, in fp32."""
    layers = [*reference.layers(tokens), reference.before_norm(tokens)]
    expected = {f"hidden.{k}": layers[k] for k in range(LAYERS)}
    for name, expected_TH in (expected | {"last_hidden": reference.after_norm(tokens)}).items():
        gap = (features[name] - expected_TH).abs().max() / expected_TH.abs().max()
        assert gap < 1e-5, (name, float(gap))


# ---------------------------------------------------------------- what shortens a capture


def test_prompts_in_chunks_and_batches_are_captured_whole(
    open_capture: OpenCapture, served_folder: Path, store: ShmStore
) -> None:
    """Chunked prefill returns the last chunk's rows alone; here they are put together."""
    reference, members = Reference(served_folder), [*LONG, *ROWS]
    for features, tokens in zip(
        features_of(open_capture(), batch(members=members)), members, strict=True
    ):
        require_features(features, tokens, reference)


def test_a_prompt_that_the_server_has_seen_is_captured_whole(
    open_capture: OpenCapture, served_folder: Path, store: ShmStore
) -> None:
    capture, reference = open_capture(), Reference(served_folder)
    for _ in range(3):
        (features,) = features_of(capture, batch(members=[LONG[0]]))
        require_features(features, LONG[0], reference)


def test_a_request_whose_prefix_is_cached_is_refused(server: Serving, store: ShmStore) -> None:
    """A client of another make, that sends no key of its own."""
    body = request_body(LONG[1], {FIELD: ask().to_json()})
    del body["extra_key"]
    first, second = (receipt_of(Server(server.url).post(body, 30)) for _ in range(2))
    store.free(store.lookup([ask().sample]).values())
    assert first is not None
    assert second is not None
    assert "ref" in first
    assert second["error"] == "short"
    assert "prefix cache" in second["reason"]


# ---------------------------------------------------------------- what is not asked for rightly


def ask(**fields: Any) -> Ask:
    fields = {"sample": "ab" * 12, "names": ("hidden.1",), "dtype": "float32"} | fields
    return Ask(**({"origin": "p", "beside": {}} | fields))


@pytest.mark.parametrize(
    "field",
    [
        17,
        {},
        {**ask().to_json(), "version": 0},
        *(
            ask(**wrong).to_json()
            for wrong in (
                {"sample": "../../etc/passwd"},
                {"sample": "shm:elsewhere"},
                {"sample": "ab" * 12 + "\n"},
                {"names": ("hidden.9",)},
                {"names": ("weights",)},
                {"names": ("hidden.1", "hidden.1")},
                {"names": ()},
                {"dtype": "float64"},
                {"origin": "p" * 5000},
                {"beside": {"last_hidden": ("int64", "")}},
                {"beside": {"../x": ("int64", "")}},
                {"beside": {"mask": ("int64", "AAAA")}},
                {"beside": {"mask": ("bool", "*not base64*")}},
                {"beside": {"mask": ("bool", "AAAA")}},  # three of five
            )
        ),
    ],
)
def test_what_has_not_the_right_form_is_refused_and_stores_nothing(
    server: Serving, store: ShmStore, field: Any
) -> None:
    answer = Server(server.url).post(request_body([5, 6, 7, 8, 9], {FIELD: field}), 30)
    receipt = receipt_of(answer)
    assert receipt is not None
    assert receipt["error"] in ("refused", "failed")
    assert receipt["reason"]
    assert len(answer["output_ids"]) == 1  # the server does its own work as ever


def test_a_capture_that_would_also_decode_is_refused(server: Serving, store: ShmStore) -> None:
    body = request_body([5, 6, 7], {FIELD: ask().to_json()})
    body["sampling_params"]["max_new_tokens"] = 3
    receipt = receipt_of(Server(server.url).post(body, 30))
    assert receipt is not None
    assert (receipt["error"], "max_new_tokens=1" in receipt["reason"]) == ("refused", True)


def test_a_request_without_the_field_is_answered_as_ever(
    server: Serving, store: ShmStore, open_capture: OpenCapture
) -> None:
    body = request_body(LONG[2], {})
    body["sampling_params"]["max_new_tokens"] = 6
    alone = Server(server.url).post(body, 30)
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(Server(server.url).post(body, 30)))
    thread.start()
    features_of(open_capture(), batch(members=LONG))
    thread.join()
    assert receipt_of(alone) is None
    assert alone["output_ids"] == beside[0]["output_ids"]


# ---------------------------------------------------------------- which server


def test_a_server_passes_the_self_test(open_capture: OpenCapture, store: ShmStore) -> None:
    open_capture(self_test=True)


def test_a_server_of_another_shape_is_refused(open_capture: OpenCapture, tmp_path: Path) -> None:
    other = TransformersTarget(str(tiny_target(tmp_path, hidden_size=64)), device="cpu")
    with pytest.raises(UsageError, match="serves another target"):
        open_capture(FeatureRequest((0,), True, "float32"), other)


def test_a_server_of_other_weights_is_refused(
    open_capture: OpenCapture, served_folder: Path, tmp_path: Path, store: ShmStore
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(served_folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(served_folder).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="other weights"):
        open_capture(ALL, TransformersTarget(str(tmp_path), device="cpu"), self_test=True)


def test_servers_that_are_away_are_named_with_what_to_do(open_capture: OpenCapture) -> None:
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9(.|\n)*capture\.options\.servers"):
        open_capture(servers=["http://127.0.0.1:9"], patience=0.5)


def test_one_server_of_two_may_be_away(
    open_capture: OpenCapture, server: Serving, store: ShmStore
) -> None:
    capture = open_capture(servers=["http://127.0.0.1:9", server.url])
    assert len(features_of(capture, batch(0, 1, 2))) == 3


# ---------------------------------------------------------------- straight into the run's store


def batches_of(rows: Sequence[Sequence[int]], size: int) -> list[CaptureBatch]:
    ids = [f"{row:024x}" for row in range(len(rows))]
    return [
        CaptureBatch(
            start // size,
            tuple(range(start, min(start + size, len(rows)))),
            tuple(ids[start : start + size]),
            tuple(rows[start : start + size]),
        )
        for start in range(0, len(rows), size)
    ]


def put(one: CaptureBatch, capture: ServerCapture, store: ShmStore) -> tuple[SampleRef, ...]:
    """Capture a batch into a store, as producers do; every third token is to be learned."""
    masks = [[at % 3 == 0 for at in range(len(tokens))] for tokens in one.token_ids]
    return put_batch(one, masks, capture, store, "made so")


def test_samples_go_straight_into_the_runs_store(
    open_capture: OpenCapture,
    served_folder: Path,
    store: ShmStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("draftcore_sglang.remote.open_store", opened.append)
    rows = [*LONG, *ROWS]
    capture, reference = open_capture(), Reference(served_folder)
    refs = [ref for one in batches_of(rows, 3) for ref in put(one, capture, store)]
    assert store.lookup([ref.feature_id for ref in refs]) == {ref.feature_id: ref for ref in refs}
    for ref, tokens in zip(refs, rows, strict=True):
        with store.get(ref) as handle:
            require_features(handle.tensors, tokens, reference)
            assert handle.tensors["token_ids"].tolist() == list(tokens)
            assert handle.tensors["loss_mask"].tolist() == [t % 3 == 0 for t in range(len(tokens))]
        assert (ref.provenance, ref.tokens) == ("made so", len(tokens))
    assert opened == []  # nothing was read here
    store.free(refs)


def test_two_producers_share_a_server(open_capture: OpenCapture, store: ShmStore) -> None:
    rows = [[20 + row, *range(30, 40)] for row in range(16)]
    asked, refs = batches_of(rows, 4), list[SampleRef]()

    def work(capture: ServerCapture, half: int) -> None:
        for one in asked[half::2]:
            refs.extend(put(one, capture, store))

    threads = [threading.Thread(target=work, args=(open_capture(), half)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {ref.feature_id for ref in refs} == {one for batch in asked for one in batch.ids}
    for ref in refs:
        with store.get(ref) as handle:
            assert handle.tensors["token_ids"].tolist() == rows[int(ref.feature_id, 16)]
    store.free(refs)


def test_a_full_store_pushes_back_and_keeps_nothing_of_the_batch(
    open_capture: OpenCapture, store: ShmStore
) -> None:
    ballast = StoreItem("ff" * 12, {"x": torch.zeros(8128 << 10, dtype=torch.uint8)}, 8128 << 10)
    full = store.put(ballast)
    capture, (asked,) = open_capture(), batches_of(LONG, 3)
    with pytest.raises(StoreFull):
        put(asked, capture, store)
    assert store.lookup(asked.ids) == {}
    store.free([full])
    store.free(put(asked, capture, store))


def test_where_the_runs_store_is_another_one_features_pass_through(
    open_capture: OpenCapture, store: ShmStore, caplog: pytest.LogCaptureFixture
) -> None:
    other = ShmStore.open("shm:test-other?max_bytes=1MiB")
    (asked,) = batches_of(LONG, 3)
    refs = put(asked, open_capture(), other)
    assert "features pass through this process" in caplog.text
    assert len(refs) == len(other.lookup(asked.ids)) == 3
    other.free(refs)
    other.close()
