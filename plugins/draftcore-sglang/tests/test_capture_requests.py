"""Capture requests and their staging memory, without sglang: joined, refused, held and answered."""

import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftcore_sglang.capture_requests import CaptureRequests, Slice
from draftcore_sglang.internals.server import ServerHooks
from draftcore_sglang.staging import Staging
from draftcore_sglang.wire import Ask, pack
from draftcore_sglang.writer import Receipt
from draftcore_shm.store import ShmStore
from torch import Tensor

ASK = Ask("ab" * 12, ("hidden.1",), "float32", "p", {})


@pytest.fixture(scope="module")
def store() -> Iterator[ShmStore]:
    store = ShmStore.open(f"shm:test-{uuid.uuid4().hex}?max_bytes={4 << 20}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def staging(store: ShmStore) -> Iterator[Staging]:
    staging = Staging(store.uri, max_bytes=1 << 20)
    yield staging
    staging.close()


@pytest.fixture
def requests(staging: Staging, store: ShmStore) -> Iterator[CaptureRequests]:
    yield CaptureRequests(staging, {"version": 1}, ("hidden.1", "last_hidden"))
    assert staging.held_bytes == 0
    store.free(store.lookup([ASK.sample]).values())


def share(
    start: int = 0,
    rows: int = 3,
    prompt: int = 3,
    *,
    first: int = 0,
    last: bool = True,
    ask: Ask = ASK,
    new_tokens: int = 1,
) -> Slice:
    return Slice("rid", ask.to_json(), prompt, start, first, rows, last, new_tokens)


def states(rows: int, value: float = 0.0) -> dict[str, Tensor]:
    return {name: torch.full((rows, 4), value) for name in ("hidden.1", "last_hidden")}


def take(
    requests: CaptureRequests, share: Slice, states: Mapping[str, Tensor] | None, ready: Any = None
) -> Receipt | None:
    """The receipt that is there at once, or None."""
    return requests.take([share], states, ready).get("rid")


def refused(
    requests: CaptureRequests, share: Slice, states: Mapping[str, Tensor] | None
) -> Receipt:
    receipt = take(requests, share, states)
    assert receipt is not None
    return receipt


def receipts_of(requests: CaptureRequests, count: int) -> list[Receipt]:
    """The receipts of all that is held, once they are there."""
    found: list[Receipt] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += [receipt for _, receipt in requests.receipts()]
        time.sleep(0.005)
    assert (len(found), requests.held) == (count, {})
    return found


def receipt_of(requests: CaptureRequests) -> Receipt:
    return receipts_of(requests, 1)[0]


def test_a_request_is_held_until_its_sample_is_stored(
    requests: CaptureRequests, store: ShmStore
) -> None:
    assert take(requests, share(), states(3)) is None
    assert "rid" in requests.held
    receipt = receipt_of(requests)
    assert store.lookup([ASK.sample])[ASK.sample].to_json() == receipt["ref"]


def test_a_writer_that_dies_fails_what_it_had_and_the_next_one_goes_on(
    requests: CaptureRequests, store: ShmStore
) -> None:
    requests.staging.writer.process.send_signal(signal.SIGSTOP)
    take(requests, share(), states(3))
    requests.staging.writer.process.kill()
    receipt = receipt_of(requests)
    assert (receipt["error"], receipt["reason"]) == (
        "failed",
        "the writer of this server ended with signal 9",
    )
    take(requests, share(), states(3))
    assert "ref" in receipt_of(requests)


def test_what_a_dead_writer_had_is_answered_also_after_the_next_one_began(
    requests: CaptureRequests, store: ShmStore
) -> None:
    """The next forward comes before anybody looked for answers; one that was sent is not lost."""
    asks = [Ask(f"{n:02d}" * 12, ("hidden.1",), "float32", "p", {}) for n in range(3)]
    shares = [replace(share(ask=ask), rid=f"rid{n}") for n, ask in enumerate(asks)]
    writer = requests.staging.writer
    requests.take([shares[0]], states(3), None)
    while not writer.has_answered:
        time.sleep(0.005)
    writer.process.send_signal(signal.SIGSTOP)
    requests.take([shares[1]], states(3), None)
    writer.process.kill()
    writer.process.wait()
    requests.take([shares[2]], states(3), None)
    assert requests.staging.writer is not writer
    found: dict[str, Receipt] = {}
    deadline = time.monotonic() + 60
    while len(found) < 3 and time.monotonic() < deadline:
        found |= requests.staging.receipts()
        time.sleep(0.005)
    assert ["ref" in found[f"rid{n}"] for n in range(3)] == [True, False, True]
    assert found["rid1"]["error"] == "failed"
    store.free(store.lookup([ask.sample for ask in asks]).values())


def test_a_writer_that_died_idle_is_replaced_unnoticed(
    requests: CaptureRequests, store: ShmStore
) -> None:
    requests.staging.writer.process.kill()
    requests.staging.writer.process.wait()
    take(requests, share(), states(3))
    assert "ref" in receipt_of(requests)


def test_the_writer_ends_with_its_server(store: ShmStore) -> None:
    """However that ends: nobody else holds the connection."""
    writer = Staging(store.uri, max_bytes=4096).writer
    writer.connection.close()
    assert writer.process.wait(60) == 0


def test_chunks_are_put_together_in_order(requests: CaptureRequests, store: ShmStore) -> None:
    take(requests, share(0, 4, 9, last=False), states(4, 1.0))
    take(requests, share(4, 4, 9, first=2, last=False), states(6, 2.0))
    take(requests, share(8, 1, 9), states(1, 3.0))
    receipt_of(requests)
    with store.get(store.lookup([ASK.sample])[ASK.sample]) as handle:
        assert handle.tensors["hidden.1"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4 + [3.0]


def test_a_request_that_was_retracted_begins_anew(
    requests: CaptureRequests, store: ShmStore
) -> None:
    take(requests, share(0, 2, 3, last=False), states(2, 1.0))
    take(requests, share(0, 3, 3), states(3, 2.0))
    receipt_of(requests)
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
def test_what_would_be_short_or_is_not_there_is_refused(
    requests: CaptureRequests, part: Slice, kind: str, reason: str
) -> None:
    receipt = refused(requests, part, states(3))
    assert receipt["error"] == kind
    assert reason in receipt["reason"]
    assert not requests.held


def test_a_forward_that_left_no_states_is_a_failure(requests: CaptureRequests) -> None:
    assert refused(requests, share(), None)["error"] == "failed"


def test_an_error_is_a_receipt(requests: CaptureRequests) -> None:
    receipt = take(requests, share(), {"hidden.1": None})
    assert receipt == {
        "error": "failed",
        "reason": "AttributeError: 'NoneType' object has no attribute 'shape'",
    }


def test_no_exception_leaves_a_hook(caplog: pytest.LogCaptureFixture) -> None:
    """It would end the server."""
    hooks = ServerHooks("shm:x", (1,), 1)
    hooks.requests = CaptureRequests(None, {}, ())
    seen: list[Any] = []
    result = hooks.around_prefill(lambda *args: seen.append(args) or "done", "processor", 1, 2)
    assert (result, seen) == ("done", [("processor", 1, 2)])
    hooks.after_logits(object(), None, None, None, None, None)
    assert "lost the captures of a batch" in caplog.text
    assert "kept no states of a forward" in caplog.text


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "bfloat16"), (1e6, "float16")]
)
def test_what_is_not_finite_in_the_stored_type_is_refused(
    requests: CaptureRequests, store: ShmStore, value: float, dtype: str
) -> None:
    take(requests, share(ask=Ask("ab" * 12, ("hidden.1",), dtype, "p", {})), states(3, value))
    receipt = receipt_of(requests)
    assert receipt["error"] == "not-finite"
    assert "hidden.1" in receipt["reason"]
    assert store.stats().samples == 0


def test_tensors_beside_must_have_a_row_for_each_token(
    requests: CaptureRequests, store: ShmStore
) -> None:
    beside = {"loss_mask": pack(torch.ones(2, dtype=torch.bool))}
    take(requests, share(ask=Ask("ab" * 12, ("hidden.1",), "float32", "p", beside)), states(3))
    assert receipt_of(requests)["reason"] == "2 rows of 'loss_mask' for 3 tokens"


def test_requests_of_one_forward_share_its_copy(requests: CaptureRequests, store: ShmStore) -> None:
    """The rows between them that nobody asked for come along; each gets its own."""
    asks = [Ask(f"{n:02d}" * 12, ("hidden.1",), "float32", "p", {}) for n in range(2)]
    shares = [
        Slice(f"rid{n}", ask.to_json(), 3, 0, 1 + 4 * n, 3, True, 1) for n, ask in enumerate(asks)
    ]
    hidden_TH = torch.arange(9.0).repeat_interleave(4).view(9, 4)
    assert requests.take(shares, {"hidden.1": hidden_TH, "last_hidden": hidden_TH}, None) == {}
    assert requests.staging.held_bytes == 7 * 16 + 16  # rounded up to 64
    assert {"ref"} == {key for receipt in receipts_of(requests, 2) for key in receipt}
    for number, ask in enumerate(asks):
        (ref,) = store.lookup([ask.sample]).values()
        with store.get(ref) as handle:
            assert handle.tensors["hidden.1"][:, 0].tolist() == [
                1 + 4 * number + k for k in range(3)
            ]
        store.free([ref])
    assert requests.staging.held_bytes == 0


def test_where_a_forward_is_too_much_each_request_is_taken_that_has_room(
    requests: CaptureRequests, store: ShmStore
) -> None:
    rows, width = 6, 8192  # 192 KiB; the buffer has 1 MiB
    asks = [Ask(f"{n:02d}" * 12, ("hidden.1",), "float32", "p", {}) for n in range(6)]
    shares = [
        Slice(f"rid{n}", ask.to_json(), rows, 0, rows * n, rows, True, 1)
        for n, ask in enumerate(asks)
    ]
    answers = requests.take(shares, {"hidden.1": torch.zeros(36, width)}, None)
    assert {rid: answer["error"] for rid, answer in answers.items()} == {"rid5": "busy"}
    assert "960.0 KiB wait" in answers["rid5"]["reason"]
    receipts_of(requests, 5)
    assert requests.staging.held_bytes == 0
    store.free(store.lookup([ask.sample for ask in asks]).values())


def test_a_prompt_for_which_there_is_never_room_is_refused(requests: CaptureRequests) -> None:
    receipt = refused(requests, share(0, 1, 40_000, last=False), states(1))
    assert receipt["error"] == "refused"
    assert "625.0 KiB" in receipt["reason"]
    assert "DRAFTCORE_BUFFER" in receipt["reason"]


def test_what_aborted_requests_left_makes_room(requests: CaptureRequests, store: ShmStore) -> None:
    """Half a prompt stays until its other half comes, or until the room is needed."""
    wide = {"hidden.1": torch.zeros(6, 8192), "last_hidden": torch.zeros(6, 8192)}
    for number in range(5):
        half = share(0, 6, 12, last=False)
        assert requests.take([replace(half, rid=f"aborted{number}")], wide, None) == {}
    assert requests.staging.held_bytes == 5 * 6 * 8192 * 4
    assert take(requests, share(0, 6, 6), wide) is None
    assert "ref" in receipt_of(requests)
    assert requests.staging.held_bytes == 0


def test_the_rest_of_a_prompt_is_refused_for_the_reason_of_its_beginning(
    requests: CaptureRequests, store: ShmStore
) -> None:
    """A client asks again later where all was busy, and gives up where something was cached."""
    full = {"hidden.1": torch.zeros(30, 8192)}  # 960 KiB of 1 MiB
    requests.staging.writer.process.send_signal(signal.SIGSTOP)
    assert take(requests, replace(share(0, 15, 15), rid="other"), full) is None
    assert take(requests, replace(share(0, 15, 15), rid="third"), full) is None
    cut = {"hidden.1": torch.zeros(6, 8192)}
    assert refused(requests, share(0, 6, 9, last=False), cut)["error"] == "busy"
    requests.staging.writer.process.send_signal(signal.SIGCONT)
    receipts_of(requests, 2)
    assert refused(requests, share(6, 3, 9), cut)["error"] == "busy"
    assert take(requests, share(0, 6, 9, last=False), cut) is None
    assert take(requests, share(6, 3, 9), cut) is None
    assert "ref" in receipt_of(requests)


def test_a_refused_request_gives_its_rows_back(requests: CaptureRequests) -> None:
    take(requests, share(0, 2, 9, last=False), states(2))
    assert refused(requests, share(3, 2, 9, last=False), states(2))["error"] == "short"
    assert requests.staging.held_bytes == 0


@pytest.fixture
def on_cuda(store: ShmStore) -> Iterator[CaptureRequests]:
    staging = Staging(store.uri, 64 << 20, "cuda")
    yield CaptureRequests(staging, {}, ("hidden.1", "last_hidden"))
    assert staging.held_bytes == 0
    staging.close()
    store.free(store.lookup([ASK.sample]).values())


@pytest.mark.gpu
def test_rows_on_a_device_are_copied_once_they_are_there_and_nobody_waits(
    on_cuda: CaptureRequests, store: ShmStore
) -> None:
    ask = replace(ASK, dtype="bfloat16")
    values_TH = torch.randn(512, 1024, device="cuda").bfloat16()
    for seconds in (0, 1):  # the first time loads the kernels, which waits
        hidden_TH = torch.zeros_like(values_TH).fill_(7)
        torch.cuda.synchronize()
        torch.cuda._sleep(seconds * 2 * 10**9)  # a forward
        hidden_TH.copy_(values_TH)
        ready = torch.cuda.Event()
        ready.record()
        began = time.monotonic()
        states = {"hidden.1": hidden_TH, "last_hidden": hidden_TH}
        assert take(on_cuda, share(0, 512, 512, ask=ask), states, ready) is None
        del hidden_TH, states
        torch.zeros_like(values_TH).fill_(7)  # takes the memory, were it free already
        launched, there = time.monotonic() - began, ready.query()
        assert "ref" in receipt_of(on_cuda)
        with store.get(store.lookup([ASK.sample])[ASK.sample]) as handle:
            assert handle.tensors["hidden.1"].equal(values_TH.cpu())
    assert launched < 0.2
    assert not there


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_on_a_device_too_one_request_that_is_not_finite_spoils_no_other(
    on_cuda: CaptureRequests, store: ShmStore, value: float
) -> None:
    asks = [Ask(f"{n:02d}" * 12, ("hidden.1",), "bfloat16", "p", {}) for n in range(2)]
    shares = [
        Slice(f"rid{n}", ask.to_json(), 3, 0, 3 * n, 3, True, 1) for n, ask in enumerate(asks)
    ]
    hidden_TH = torch.randn(6, 4, device="cuda").bfloat16()
    for kinds in (["stored", "stored"], ["not-finite", "stored"]):
        ready = torch.cuda.Event()
        ready.record()
        assert on_cuda.take(shares, {"hidden.1": hidden_TH}, ready) == {}
        found = [receipt.get("error", "stored") for receipt in receipts_of(on_cuda, 2)]
        assert sorted(found) == kinds
        refs = store.lookup([ask.sample for ask in asks])
        with store.get(refs[asks[0].sample]) as handle:
            assert handle.tensors["hidden.1"].equal(hidden_TH[:3].cpu())
        store.free(refs.values())
        hidden_TH[4, 2] = value
