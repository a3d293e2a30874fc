"""A server that batches, chunks and caches as it likes: what it captures, refuses and stores.

Its prefix cache is on and a chunk has 16 tokens, so that whatever shortens a capture is there.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import require_features
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import ALL, ROWS, Reference, batch, features_of
from draftcore_sdk.serving import Serving
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.client import Server
from draftcore_sglang.remote import ServerCapture, receipt_of, request_body
from draftcore_sglang.wire import FIELD, Ask
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.store import SampleRef, StoreFull, StoreItem
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
LONG = [list(range(3, 103)), [7] * 41, list(range(50, 83))]
ASK = Ask("ab" * 12, ("hidden.1",), "float32", "p", {})
OpenCapture = Callable[..., ServerCapture]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Serving], sink: str) -> Iterator[Serving]:
    server = start_server(
        "--chunked-prefill-size=16", DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,1,2,3"
    )
    yield server
    assert server.alive


# ---------------------------------------------------------------- what shortens a capture


@pytest.mark.usefixtures("store")
def test_prompts_in_chunks_and_batches_are_captured_whole_also_if_they_were_seen_before(
    server: Serving, open_capture: OpenCapture, served_folder: Path
) -> None:
    """Chunked prefill returns the last chunk's rows alone, a cached prefix none; here all come."""
    reference, capture, members = Reference(served_folder), open_capture(server), [*LONG, *ROWS]
    for _ in range(2):
        found = features_of(capture, batch(members=members))
        for features, tokens in zip(found, members, strict=True):
            require_features(features, tokens, reference)


def test_a_request_whose_prefix_is_cached_is_refused(server: Serving, store: ShmStore) -> None:
    """A client of another make, that sends no key of its own."""
    body = request_body(LONG[1], {FIELD: ASK.to_json()})
    del body["extra_key"]
    first, second = (receipt_of(Server(server.url).post(body, 30)) or {} for _ in range(2))
    store.free(store.lookup([ASK.sample]).values())
    assert "ref" in first
    assert second["error"] == "short"
    assert "prefix cache" in second["reason"]


# ---------------------------------------------------------------- what is not asked for rightly


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("field", "error"),
    [
        (17, "refused"),
        (replace(ASK, names=("hidden.9",)).to_json(), "refused"),
        (replace(ASK, beside={"mask": ("bool", "*not base64*")}).to_json(), "failed"),
        (replace(ASK, beside={"mask": ("bool", "AAAA")}).to_json(), "refused"),  # three of five
    ],
)
def test_what_is_not_asked_for_rightly_stores_nothing_and_is_answered_as_ever(
    server: Serving, field: Any, error: str
) -> None:
    answer = Server(server.url).post(request_body([5, 6, 7, 8, 9], {FIELD: field}), 30)
    receipt = receipt_of(answer) or {}
    assert receipt["error"] == error
    assert receipt["reason"]
    assert len(answer["output_ids"]) == 1


@pytest.mark.usefixtures("store")
def test_a_request_without_the_field_is_answered_as_ever(
    server: Serving, open_capture: OpenCapture
) -> None:
    body = request_body(LONG[2], {})
    body["sampling_params"]["max_new_tokens"] = 6
    alone = Server(server.url).post(body, 30)
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(Server(server.url).post(body, 30)))
    thread.start()
    features_of(open_capture(server), batch(members=LONG))
    thread.join()
    assert receipt_of(alone) is None
    assert alone["output_ids"] == beside[0]["output_ids"]


# ---------------------------------------------------------------- which server


@pytest.mark.usefixtures("store")
def test_a_server_of_another_shape_or_of_other_weights_is_refused(
    server: Serving, open_capture: OpenCapture, served_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wide = TransformersTarget(str(tiny_target(tmp_path / "wide", hidden_size=64)), device="cpu")
    with pytest.raises(UsageError, match="serves another target"):
        open_capture(server, FeatureRequest((0,), True, "float32"), wide)
    model = AutoModelForCausalLM.from_pretrained(served_folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(served_folder).save_pretrained(tmp_path)
    other = TransformersTarget(str(tmp_path), device="cpu")
    with pytest.raises(UsageError, match=rf"{server.url} does not predict as(.|\n)*other weights"):
        open_capture(server, ALL, other, self_test=True)


# ---------------------------------------------------------------- straight into the run's store

MEMBERS = batch(members=[*LONG, *ROWS])
ASKED = replace(MEMBERS, ids=tuple(f"{row:024x}" for row in MEMBERS.rows))


def put(capture: ServerCapture, store: ShmStore) -> tuple[SampleRef, ...]:
    """Capture a batch into a store, as producers do; every third token is to be learned."""
    text = [
        {"token_ids": torch.tensor(tokens), "loss_mask": torch.arange(len(tokens)) % 3 == 0}
        for tokens in ASKED.token_ids
    ]
    assert capture.reaches(store)
    return capture.deliver(ASKED, text, "made so", store)


def test_samples_go_straight_into_the_runs_store(
    server: Serving,
    open_capture: OpenCapture,
    served_folder: Path,
    store: ShmStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("draftcore_sglang.remote.open_store", opened.append)
    reference, refs = Reference(served_folder), put(open_capture(server), store)
    assert store.lookup(ASKED.ids) == {ref.feature_id: ref for ref in refs}
    for ref, tokens in zip(refs, ASKED.token_ids, strict=True):
        with store.get(ref) as handle:
            require_features(handle.tensors, tokens, reference)
            assert handle.tensors["token_ids"].tolist() == list(tokens)
            assert handle.tensors["loss_mask"].tolist() == [t % 3 == 0 for t in range(len(tokens))]
        assert (ref.provenance, ref.tokens) == ("made so", len(tokens))
    assert opened == []  # nothing was read here
    store.free(refs)


def test_a_full_store_pushes_back_and_keeps_nothing_of_the_batch(
    server: Serving, open_capture: OpenCapture, store: ShmStore
) -> None:
    ballast = StoreItem("ff" * 12, {"x": torch.zeros(8128 << 10, dtype=torch.uint8)}, 8128 << 10)
    full, capture = store.put(ballast), open_capture(server)
    with pytest.raises(StoreFull):
        put(capture, store)
    assert store.lookup(ASKED.ids) == {}
    store.free([full])
    store.free(put(capture, store))


@pytest.mark.usefixtures("store")
def test_where_the_runs_store_is_another_one_features_pass_through(
    server: Serving, open_capture: OpenCapture, caplog: pytest.LogCaptureFixture
) -> None:
    other = ShmStore.open("shm:test-other?max_bytes=1MiB")
    capture = open_capture(server)
    assert not capture.reaches(other)
    assert "features pass through this process" in caplog.text
    assert len(features_of(capture, ASKED)) == len(ASKED.ids)
    other.close()
