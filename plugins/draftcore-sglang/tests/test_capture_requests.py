"""What a server does with captures, without sglang: joined, staged, written, refused, held, answered."""

import re
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_file.store import FileStore
from draftcore_sglang.capture_requests import CaptureRequests, Slice
from draftcore_sglang.internals.server import ServerHooks
from draftcore_sglang.staging import Staging
from draftcore_sglang.wire import Ask, digest, pack
from draftcore_sglang.writer import LARGEST, Job, Place, Receipt, Writer
from torch import Tensor

from draftcore import load_plugins
from draftcore.contracts.store import StoreItem

SAMPLE, OTHER, BYTES = "ab" * 12, "cd" * 12, 4 << 20
ASK = Ask(SAMPLE, ("hidden.1",), "float32", "p", {})


@pytest.fixture(scope="module")
def opened() -> Iterator[FileStore]:
    store = FileStore.open(f"file:/dev/shm/test-{uuid.uuid4().hex}?volatile=yes&max_bytes={BYTES}")
    yield store
    store.close()


@pytest.fixture
def store(opened: FileStore) -> Iterator[FileStore]:
    yield opened
    opened.free(opened.lookup([SAMPLE, OTHER, *map(sample, range(6))]).values())


@pytest.fixture(scope="module")
def staging(opened: FileStore) -> Iterator[Staging]:
    staging = Staging(opened.uri, max_bytes=1 << 20)
    yield staging
    staging.close()


@pytest.fixture
def requests(staging: Staging, store: FileStore) -> Iterator[CaptureRequests]:
    yield CaptureRequests(staging, {"version": 1}, ("hidden.1", "last_hidden"))
    assert staging.held_bytes == 0


def sample(number: int) -> str:
    return f"{number:02d}" * 12


def share(start: int = 0, rows: int = 3, prompt: int = 3, ask: Ask = ASK, **more: Any) -> Slice:
    usual = Slice("rid", ask.to_json(), prompt, start, 0, rows, True, 1, range(prompt))
    return replace(usual, **more)


def several(
    count: int, rows: int, step: int, first: int = 0, dtype: str = "float32"
) -> list[Slice]:
    """Shares of one forward, each of another sample: rid0, rid1 and so on, every `step` rows."""
    asks = [replace(ASK, sample=sample(n), dtype=dtype) for n in range(count)]
    numbered = enumerate(asks)
    return [share(0, rows, rows, a, rid=f"rid{n}", first=first + step * n) for n, a in numbered]


def states(rows: int, value: float = 0.0, width: int = 4) -> dict[str, Tensor]:
    return {name: torch.full((rows, width), value) for name in ("hidden.1", "last_hidden")}


def take(
    requests: CaptureRequests, share: Slice, states: Mapping[str, Any] | None, ready: Any = None
) -> Receipt | None:
    """The receipt that is there at once, or None."""
    return requests.take([share], states, ready).get(share.rid)


def receipts_of(requests: CaptureRequests, count: int = 1) -> dict[str, Receipt]:
    """The receipts of all that is held, by request id, once they are there."""
    found: dict[str, Receipt] = {}
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        requests.held |= {rid: rid for rid in requests.held}
        found |= dict(requests.receipts())
        time.sleep(0.005)
    assert (len(found), requests.held) == (count, {})
    return found


def rows_of(store: FileStore, sample: str) -> list[float]:
    """The first number of each row that was stored of a sample."""
    with store.get(store.lookup([sample])[sample]) as handle:
        first: list[float] = handle.tensors["hidden.1"][:, 0].tolist()
        return first


@pytest.mark.parametrize("read", ["", digest(range(3))])
def test_a_request_is_held_until_its_sample_is_stored(
    requests: CaptureRequests, store: FileStore, read: str
) -> None:
    assert take(requests, share(ask=replace(ASK, read=read)), states(3)) is None
    assert "rid" in requests.held
    receipt = receipts_of(requests)["rid"]
    assert store.lookup([SAMPLE])[SAMPLE].to_json() == receipt["ref"]


def test_a_writer_that_dies_fails_what_it_had_and_the_next_one_goes_on(
    requests: CaptureRequests,
) -> None:
    """Also where the next forward comes before anybody looked; what was answered is not lost."""
    requests.staging.writer.process.send_signal(signal.SIGSTOP)
    take(requests, share(), states(3))
    requests.staging.writer.process.kill()
    reason = "the writer of this server ended with signal 9"
    assert receipts_of(requests)["rid"] == {"error": "failed", "reason": reason}
    take(requests, share(), states(3))
    assert "ref" in receipts_of(requests)["rid"]
    shares, writer = several(3, 3, 0), requests.staging.writer
    take(requests, shares[0], states(3))
    while not writer.has_answered:
        time.sleep(0.005)
    writer.process.send_signal(signal.SIGSTOP)
    take(requests, shares[1], states(3))
    writer.process.kill()
    writer.process.wait()
    take(requests, shares[2], states(3))
    assert requests.staging.writer is not writer
    found = receipts_of(requests, 3)
    assert ["ref" in found[f"rid{n}"] for n in range(3)] == [True, False, True]


def test_chunks_are_put_together_in_order(requests: CaptureRequests, store: FileStore) -> None:
    """Also after a request was retracted, and began anew."""
    take(requests, share(0, 2, 9, last=False), states(2, 7.0))
    take(requests, share(0, 4, 9, last=False), states(4, 1.0))
    take(requests, share(4, 4, 9, first=2, last=False), states(6, 2.0))
    take(requests, share(8, 1, 9), states(1, 3.0))
    receipts_of(requests)
    assert rows_of(store, SAMPLE) == [1.0] * 4 + [2.0] * 4 + [3.0]


@pytest.mark.parametrize(
    ("part", "given", "kind", "reason"),
    [
        (share(2, 1, 3), states(3), "short", "2 of 3 tokens came from the prefix cache"),
        (share(0, 2, 3), states(3), "short", "2 rows of states for 3 tokens"),
        (share(ask=replace(ASK, names=("hidden.7",))), states(3), "refused", "not hidden.7"),
        (share(new_tokens=2), states(3), "refused", "max_new_tokens=1"),
        (share(0, 1, 40_000, last=False), states(1), "refused", "625.0 KiB.*DRAFTCORE_BUFFER"),
        (share(ask=replace(ASK, read=digest([7, 9, 9]))), states(3), "misread", "other tokens, 3"),
        (share(), None, "failed", "left no states"),
        (share(), {"hidden.1": None}, "failed", "'NoneType' object has no attribute 'shape'"),
    ],
)  # fmt: skip
def test_what_would_be_short_or_cannot_be_taken_is_refused(
    requests: CaptureRequests, part: Slice, given: Any, kind: str, reason: str
) -> None:
    receipt = take(requests, part, given) or {}
    assert (receipt["error"], not requests.held) == (kind, True)
    assert re.search(reason, receipt["reason"])


def test_a_prompt_with_a_gap_is_refused_and_gives_its_rows_back(requests: CaptureRequests) -> None:
    take(requests, share(0, 2, 9, last=False), states(2))
    receipt = take(requests, share(3, 2, 9, last=False), states(2)) or {}
    assert (receipt["error"], requests.staging.held_bytes) == ("short", 0)


def test_no_exception_leaves_a_hook_where_it_would_end_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = ServerHooks("file:x", (1,), 1)
    hooks.requests = CaptureRequests(None, {}, ())
    seen: list[Any] = []
    result = hooks.around_prefill(lambda *args: seen.append(args) or "done", "processor", 1, 2)  # type: ignore[func-returns-value]
    assert (result, seen) == ("done", [("processor", 1, 2)])
    hooks.after_logits(object(), None, None, None, None, None)
    assert "lost the captures of a batch" in caplog.text
    assert "kept no states of a forward" in caplog.text


@pytest.mark.parametrize(
    ("packed", "kind", "reason"),
    [
        (pack(torch.ones(2, dtype=torch.bool)), "refused", "2 rows of 'loss_mask' for 3 tokens"),
        (("bool", "*not base64*"), "failed", "Error: "),
    ],
)
def test_tensors_beside_must_be_such_and_have_a_row_for_each_token(
    requests: CaptureRequests, store: FileStore, packed: tuple[str, str], kind: str, reason: str
) -> None:
    take(requests, share(ask=replace(ASK, beside={"loss_mask": packed})), states(3))
    receipt = receipts_of(requests)["rid"]
    assert (receipt["error"], store.lookup([SAMPLE])) == (kind, {})
    assert reason in receipt["reason"]


def test_requests_of_one_forward_share_its_copy(
    requests: CaptureRequests, store: FileStore
) -> None:
    """The rows between them that nobody asked for come along; each gets its own."""
    hidden_TH = torch.arange(9.0).repeat_interleave(4).view(9, 4)
    given = {"hidden.1": hidden_TH, "last_hidden": hidden_TH}
    assert requests.take(several(2, 3, 4, first=1), given, None) == {}
    assert requests.staging.held_bytes == 7 * 16 + 16  # rounded up to 64
    receipts_of(requests, 2)
    assert [rows_of(store, sample(n)) for n in range(2)] == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]


def test_where_a_forward_is_too_much_each_request_is_taken_that_has_room(
    requests: CaptureRequests,
) -> None:
    """Each has 192 KiB; the buffer has 1 MiB."""
    answers = requests.take(several(6, 6, 6), states(36, width=8192), None)
    assert {rid: answer["error"] for rid, answer in answers.items()} == {"rid5": "busy"}
    assert "960.0 KiB wait" in answers["rid5"]["reason"]
    receipts_of(requests, 5)


def test_what_aborted_requests_left_makes_room(requests: CaptureRequests) -> None:
    """Half a prompt stays until its other half comes, or until the room is needed."""
    wide = states(6, width=8192)
    for number in range(5):
        assert take(requests, share(0, 6, 12, rid=f"aborted{number}", last=False), wide) is None
    assert requests.staging.held_bytes == 5 * 6 * 8192 * 4
    assert take(requests, share(0, 6, 6), wide) is None
    assert "ref" in receipts_of(requests)["rid"]


def test_the_rest_of_a_prompt_is_refused_for_the_reason_of_its_beginning(
    requests: CaptureRequests,
) -> None:
    """A client asks again later where all was busy, and gives up where something was cached."""
    full, cut = states(30, width=8192), states(6, width=8192)  # 960 KiB of 1 MiB
    beginning, rest = share(0, 6, 9, last=False), share(6, 3, 9)
    requests.staging.writer.process.send_signal(signal.SIGSTOP)
    for rid in ("other", "third"):
        assert take(requests, share(0, 15, 15, rid=rid), full) is None
    refusals = [take(requests, beginning, cut)]
    requests.staging.writer.process.send_signal(signal.SIGCONT)
    receipts_of(requests, 2)
    refusals.append(take(requests, rest, cut))
    assert [refusal and refusal["error"] for refusal in refusals] == ["busy", "busy"]
    assert take(requests, beginning, cut) is take(requests, rest, cut) is None
    assert "ref" in receipts_of(requests)["rid"]


def test_the_writer_ends_with_its_server(staging: Staging) -> None:
    """However that ends: nobody else holds the connection. After it none of these tests stages."""
    staging.writer.connection.close()
    assert staging.writer.process.wait(60) == 0


# ---------------------------------------------------------------- the writer, in this process


@pytest.fixture
def writer(store: FileStore) -> Iterator[Writer]:
    writer = Writer(f"{store.uri}&max_bytes={BYTES}", torch.zeros(1 << 16, dtype=torch.uint8))
    yield writer
    writer.close()


def job(writer: Writer, states_TH: Tensor, at: int = 0, **ask: Any) -> Job:
    """A job whose states lie in the writer's memory from byte `at` on."""
    place = Place(at, len(states_TH), states_TH.shape[1], states_TH.dtype)
    place.of(writer.memory).copy_(states_TH)
    asked = replace(ASK, **ask)
    return Job(asked.sample, asked, len(states_TH), [{"hidden.1": place}])


@pytest.mark.parametrize(
    ("value", "dtype", "stored"),
    [
        (float("nan"), torch.float32, "float32"),
        (float("inf"), torch.bfloat16, "bfloat16"),
        (float("-inf"), torch.float16, "float16"),
        (1e6, torch.float32, "float16"),
    ],
)
def test_one_number_that_is_not_finite_as_it_is_stored_is_noticed_and_spoils_no_other_sample(
    writer: Writer, value: float, dtype: torch.dtype, stored: str
) -> None:
    states_TH = torch.randn(33, 65).to(dtype)
    states_TH[17, 29] = value
    other = job(writer, torch.zeros(3, 4), 32 << 10, sample=OTHER)
    receipts = writer.write([job(writer, states_TH, dtype=stored), other])
    assert receipts[SAMPLE]["error"] == "not-finite"
    assert "hidden.1" in receipts[SAMPLE]["reason"]
    assert "ref" in receipts[OTHER]


@pytest.mark.parametrize(
    ("largest", "dtype", "looked"),
    [(2.0, "float32", False), (1e6, "float32", False), (1e6, "float16", True)]
    + [(value, "float32", True) for value in (float("inf"), float("nan"))],
)
def test_what_a_device_found_finite_in_the_stored_type_is_not_looked_at_again(
    writer: Writer, largest: float, dtype: str, looked: bool
) -> None:
    """And where it found something, what has it is told from what shared a forward with it."""
    holds_nan = job(writer, torch.full((3, 4), torch.nan), dtype=dtype)
    clean = job(writer, torch.zeros(3, 4), 4096, sample=OTHER, dtype=dtype)
    found = Place(8192, 1, 1, torch.float32)
    found.of(writer.memory).fill_(largest)
    jobs = [replace(one, parts=[{**one.parts[0], LARGEST: found}]) for one in (holds_nan, clean)]
    receipts = writer.write(jobs)
    assert ("error" in receipts[SAMPLE], "ref" in receipts[OTHER]) == (looked, True)


def test_a_full_store_is_said_to_be_full(writer: Writer, store: FileStore) -> None:
    length = (BYTES >> 2) - 4096
    ballast = store.put(StoreItem(OTHER, {"x": torch.zeros(length)}, length))
    wide = job(writer, torch.zeros(3, 4000))
    assert writer.write([wide])[SAMPLE]["error"] == "full"
    store.free([ballast])
    assert "ref" in writer.write([wide])[SAMPLE]


ONE_PROCESS = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

@hookimpl
def describe():
    return [Offer("store", "only-here")]

@hookimpl
def feature_store(name): ...
"""


def test_a_store_that_cannot_be_opened_is_a_reason_in_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "store_of_one_process.py"
    file.write_text(ONE_PROCESS)
    registry = load_plugins(files=[file])
    monkeypatch.setattr("draftcore_sglang.writer.load_plugins", lambda: registry)
    for uri, reason in {"nosuch:x": "no store 'nosuch'", "only-here:x": "in one process"}.items():
        writer = Writer(uri, torch.zeros(1 << 10, dtype=torch.uint8))
        assert reason in writer.write([job(writer, torch.zeros(3, 4))])[SAMPLE]["reason"]


def test_what_a_dead_client_did_not_read_is_freed(
    writer: Writer, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftcore_sglang.writer.LENT", 0.0)
    writer.write([job(writer, torch.zeros(3, 4), sample=OTHER, lent=True)])
    assert store.lookup([OTHER])
    writer.write([job(writer, torch.zeros(3, 4))])
    assert not store.lookup([OTHER])


# ---------------------------------------------------------------- on a device


@pytest.fixture
def on_cuda(store: FileStore) -> Iterator[CaptureRequests]:
    staging = Staging(store.uri, 64 << 20, "cuda")
    yield CaptureRequests(staging, {}, ("hidden.1", "last_hidden"))
    assert staging.held_bytes == 0
    staging.close()


@pytest.mark.gpu
def test_rows_on_a_device_are_copied_once_they_are_there_and_nobody_waits(
    on_cuda: CaptureRequests, store: FileStore
) -> None:
    values_TH = torch.randn(512, 1024, device="cuda").bfloat16()
    for seconds in (0, 1):  # the first time loads the kernels, which waits
        hidden_TH = torch.zeros_like(values_TH).fill_(7)
        torch.cuda.synchronize()
        torch.cuda._sleep(seconds * 2 * 10**9)  # type: ignore[no-untyped-call]  # a forward
        hidden_TH.copy_(values_TH)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        began = time.monotonic()
        states = {"hidden.1": hidden_TH, "last_hidden": hidden_TH}
        asked = share(0, 512, 512, replace(ASK, dtype="bfloat16"))
        assert take(on_cuda, asked, states, ready) is None
        del hidden_TH, states
        torch.zeros_like(values_TH).fill_(7)  # takes the memory, were it free already
        launched, there = time.monotonic() - began, ready.query()  # type: ignore[no-untyped-call]
        assert "ref" in receipts_of(on_cuda)["rid"]
        with store.get(store.lookup([SAMPLE])[SAMPLE]) as handle:
            assert handle.tensors["hidden.1"].equal(values_TH.cpu())
    assert launched < 0.2
    assert not there


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_on_a_device_too_one_request_that_is_not_finite_spoils_no_other(
    on_cuda: CaptureRequests, store: FileStore, value: float
) -> None:
    hidden_TH = torch.randn(6, 4, device="cuda").bfloat16()
    for kinds in (["stored", "stored"], ["not-finite", "stored"]):
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        shares = several(2, 3, 3, dtype="bfloat16")
        assert on_cuda.take(shares, {"hidden.1": hidden_TH}, ready) == {}
        found = receipts_of(on_cuda, 2).values()
        assert sorted(receipt.get("error", "stored") for receipt in found) == kinds
        refs = store.lookup([sample(0), sample(1)])
        with store.get(refs[sample(0)]) as handle:
            assert handle.tensors["hidden.1"].equal(hidden_TH[:3].cpu())
        store.free(refs.values())
        hidden_TH[4, 2] = value
