"""What the writer puts and refuses, in this process instead of one of its own."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftcore_sglang.wire import Ask
from draftcore_sglang.writer import LARGEST, Job, Place, Writer
from draftcore_shm.store import ShmStore
from torch import Tensor

from draftcore import load_plugins
from draftcore.contracts.store import StoreItem

SAMPLE, OTHER = "ab" * 12, "cd" * 12


@pytest.fixture
def store() -> Iterator[ShmStore]:
    store = ShmStore.open(f"shm:test-{uuid.uuid4().hex}?max_bytes={1 << 20}")
    yield store
    store.free(store.lookup([SAMPLE, OTHER]).values())
    store.close()


@pytest.fixture
def writer(store: ShmStore) -> Iterator[Writer]:
    writer = Writer(store.uri, torch.zeros(1 << 16, dtype=torch.uint8))
    yield writer
    writer.close()


def job(
    writer: Writer,
    *chunks: Tensor,
    at: int = 0,
    sample: str = SAMPLE,
    dtype: str = "float32",
    lent: bool = False,
) -> Job:
    """A job whose chunks lie in the writer's memory from byte `at` on."""
    ask = Ask(sample, ("hidden.1",), dtype, "p", {}, lent)
    parts = []
    for chunk in chunks:
        parts.append({"hidden.1": Place(at, *chunk.shape, chunk.dtype)})
        parts[-1]["hidden.1"].of(writer.memory).copy_(chunk)
        at += chunk.nbytes
    return Job(sample, ask, sum(map(len, chunks)), parts)


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
    other = job(writer, torch.zeros(3, 4), at=32 << 10, sample=OTHER)
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
    clean = job(writer, torch.zeros(3, 4), at=4096, sample=OTHER, dtype=dtype)
    found = Place(8192, 1, 1, torch.float32)
    found.of(writer.memory).fill_(largest)
    jobs = [replace(one, parts=[{**one.parts[0], LARGEST: found}]) for one in (holds_nan, clean)]
    receipts = writer.write(jobs)
    assert ("error" in receipts[SAMPLE]) == looked
    assert "ref" in receipts[OTHER]


def test_a_full_store_is_said_to_be_full(writer: Writer, store: ShmStore) -> None:
    ballast = store.put(StoreItem(OTHER, {"x": torch.zeros(261_000)}, 261_000))
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
    writer: Writer, store: ShmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftcore_sglang.writer.LENT", 0.0)
    writer.write([job(writer, torch.zeros(3, 4), sample=OTHER, lent=True)])
    assert store.lookup([OTHER])
    writer.write([job(writer, torch.zeros(3, 4))])
    assert not store.lookup([OTHER])
