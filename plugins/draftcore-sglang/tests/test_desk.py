"""The desk and the writer, without sglang: what is put together, refused, held and answered."""

import time
import uuid

import pytest
import torch
from draftcore_sglang.desk import Desk, Slice
from draftcore_sglang.internals.server import Taps
from draftcore_sglang.sink import Job, Part, Writer
from draftcore_sglang.wire import Ask, Refusal, pack

from draftcore.records import StoreItem
from draftcore.stores.shm import ShmStore

ASK = Ask("ab" * 12, ("hidden.1",), "float32", "p", {})


@pytest.fixture
def store():
    store = ShmStore.open(f"shm:test-{uuid.uuid4().hex}?max_bytes={1 << 20}")
    yield store
    store.free(store.lookup([ASK.sample]).values())
    store.close()


@pytest.fixture
def desk(store):
    writer = Writer(store.uri, max_bytes=1 << 20)
    yield Desk(writer, {"version": 1}, ("hidden.1", "last_hidden"))
    writer._close()


def share(start=0, rows=3, prompt=3, *, first=0, last=True, ask=ASK, new_tokens=1):
    return Slice("rid", ask.to_json(), prompt, start, first, rows, last, new_tokens)


def states(rows, value=0.0):
    return {name: torch.full((rows, 4), value) for name in ("hidden.1", "last_hidden")}


def receipt_of(desk):
    """The receipt of what is held, once it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := desk.receipts():
            assert not desk.held
            return found[0][1]
        time.sleep(0.005)
    raise AssertionError("no receipt came")


def test_a_request_is_held_until_its_sample_is_stored(desk, store):
    assert desk.take(share(), states(3), None) is None
    assert "rid" in desk.held
    receipt = receipt_of(desk)
    assert store.lookup([ASK.sample])[ASK.sample].to_json() == receipt["ref"]


def test_chunks_are_put_together_in_order(desk, store):
    desk.take(share(0, 4, 9, last=False), states(4, 1.0), None)
    desk.take(share(4, 4, 9, first=2, last=False), states(6, 2.0), None)
    desk.take(share(8, 1, 9), states(1, 3.0), None)
    receipt_of(desk)
    with store.get(store.lookup([ASK.sample])[ASK.sample]) as handle:
        assert handle.tensors["hidden.1"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4 + [3.0]


def test_a_request_that_was_retracted_begins_anew(desk, store):
    desk.take(share(0, 2, 3, last=False), states(2, 1.0), None)
    desk.take(share(0, 3, 3), states(3, 2.0), None)
    receipt_of(desk)
    with store.get(store.lookup([ASK.sample])[ASK.sample]) as handle:
        assert handle.tensors["hidden.1"][:, 0].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("part", "kind", "reason"),
    [
        (share(2, 1, 3), "short", "2 of 3 tokens came from the prefix cache"),
        (share(0, 2, 3), "short", "2 rows of states for 3 tokens"),
        (share(ask=Ask("ab" * 12, ("hidden.7",), "float32", "p", {})), "refused", "not hidden.7"),
        (share(new_tokens=2), "refused", "max_new_tokens=1"),
    ],
)
def test_what_would_be_short_or_is_not_there_is_refused(desk, part, kind, reason):
    receipt = desk.take(part, states(3), None)
    assert receipt["error"] == kind
    assert reason in receipt["reason"]
    assert not desk.held


def test_a_forward_that_left_no_states_is_a_failure(desk):
    assert desk.take(share(), None, None)["error"] == "failed"


def test_an_error_at_the_desk_is_a_receipt(desk):
    receipt = desk.take(share(), {"hidden.1": None}, None)
    assert receipt == {
        "error": "failed",
        "reason": "TypeError: 'NoneType' object is not subscriptable",
    }


def test_no_exception_leaves_a_hook(caplog):
    """It would end the server."""
    taps = Taps("memory", (1,), 1)
    taps.desk = Desk(None, {}, ())
    seen = []
    result = taps.around_prefill(lambda *args: seen.append(args) or "done", "processor", 1, 2)
    assert (result, seen) == ("done", [("processor", 1, 2)])
    taps.after_logits(object(), None, None, None, None, None)
    assert "lost the captures of a batch" in caplog.text
    assert "kept no states of a forward" in caplog.text


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "bfloat16"), (1e6, "float16")]
)
def test_what_is_not_finite_in_the_stored_type_is_refused(desk, store, value, dtype):
    desk.take(share(ask=Ask("ab" * 12, ("hidden.1",), dtype, "p", {})), states(3, value), None)
    receipt = receipt_of(desk)
    assert receipt["error"] == "not-finite"
    assert "hidden.1" in receipt["reason"]
    assert store.stats().samples == 0


def test_tensors_beside_must_have_a_row_for_each_token(desk, store):
    beside = {"loss_mask": pack(torch.ones(2, dtype=torch.bool))}
    desk.take(share(ask=Ask("ab" * 12, ("hidden.1",), "float32", "p", beside)), states(3), None)
    assert receipt_of(desk)["reason"] == "2 rows of 'loss_mask' for 3 tokens"


def job(tensor, answers, sample=ASK.sample):
    ask = Ask(sample, ("hidden.1",), "float32", "p", {})
    return Job(ask, len(tensor), [Part({"hidden.1": tensor})], answers.append)


def wait_for(answers, count):
    deadline = time.monotonic() + 10
    while len(answers) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return answers


def test_more_than_the_buffer_is_refused_as_busy(store):
    """One sample is always taken: a buffer that is smaller holds it alone."""
    writer, answers = Writer("nosuch:x", max_bytes=100), []
    writer._write = lambda jobs: time.sleep(60)
    for _ in range(2):
        writer.take(job(torch.zeros(3, 4), answers))  # 48 bytes
    with pytest.raises(Refusal, match="96 bytes wait") as caught:
        writer.take(job(torch.zeros(3, 4), answers))
    assert caught.value.kind == "busy"


def test_one_sample_that_cannot_be_stored_spoils_no_other(store):
    writer, answers, bad = Writer(store.uri, max_bytes=1 << 20), [], []
    writer._write(
        [job(torch.zeros(3, 4), answers), job(torch.full((3, 4), torch.nan), bad, "cd" * 12)]
    )
    assert (list(answers[0]), bad[0]["error"]) == (["ref"], "not-finite")
    writer._close()


def test_a_full_store_is_told_as_such(store):
    ballast = store.put(StoreItem("cd" * 12, {"x": torch.zeros(261_000)}, 261_000))
    writer, answers = Writer(store.uri, max_bytes=1 << 20), []
    writer.take(job(torch.zeros(3, 4000), answers))
    assert wait_for(answers, 1)[0]["error"] == "full"
    store.free([ballast])
    writer.take(job(torch.zeros(3, 4000), answers))
    assert "ref" in wait_for(answers, 2)[1]
    writer._close()


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("nosuch:x", "there is no store 'nosuch'"), ("memory", "stays in one process")],
)
def test_a_sink_that_cannot_be_opened_is_a_reason_in_the_receipt(uri, reason):
    writer, answers = Writer(uri, max_bytes=1 << 20), []
    writer.take(job(torch.zeros(3, 4), answers))
    assert reason in wait_for(answers, 1)[0]["reason"]


def test_what_a_dead_client_did_not_read_is_freed(store, monkeypatch):
    monkeypatch.setattr("draftcore_sglang.sink.LENT", 0.0)
    writer, answers = Writer(store.uri, max_bytes=1 << 20), []
    lent = Ask("cd" * 12, ("hidden.1",), "float32", "", {}, lent=True)
    writer.take(Job(lent, 3, [Part({"hidden.1": torch.zeros(3, 4)})], answers.append))
    wait_for(answers, 1)
    assert store.lookup(["cd" * 12])
    writer.take(job(torch.zeros(3, 4), answers))
    wait_for(answers, 2)
    assert not store.lookup(["cd" * 12])
    writer._close()
