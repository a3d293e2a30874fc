"""What breaks while a server captures: the server itself, and the store under it."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftcore_sdk.captures import batch
from draftcore_sdk.serving import Serving
from draftcore_sglang.remote import ServerCapture
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.store import SampleRef

pytestmark = pytest.mark.sglang
REQUEST = FeatureRequest((0, 2), True, "float32")
StartServer = Callable[..., Serving]
OpenCapture = Callable[..., ServerCapture]
Delivered = tuple[Sequence[SampleRef], list[list[int]]]  # and the tokens of each


@pytest.fixture(scope="module")
def server(start_server: StartServer, sink: str) -> Serving:
    return start_server(DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,2")


def deliver(capture: ServerCapture, store: ShmStore, number: int) -> Delivered:
    """A batch of eight, told apart by its tokens."""
    members = [[10 + row, *range(30, 90), number] for row in range(8)]
    ids = tuple(f"{number:020x}{row:04x}" for row in range(8))
    asked = replace(batch(members=members, index=number), ids=ids)
    beside = [{"token_ids": torch.tensor(member)} for member in members]
    return capture.deliver(asked, beside, "made so", store), members


def require_stored(store: ShmStore, *delivered: Delivered) -> None:
    """And free it."""
    for refs, members in delivered:
        for ref, member in zip(refs, members, strict=True):
            with store.get(ref) as handle:
                assert handle.tensors["token_ids"].tolist() == member
                assert {len(handle.tensors[name]) for name in REQUEST.names} == {len(member)}
        store.free(refs)


def writer_of(server: Serving) -> int:
    """The process beside the scheduler that puts: of the server's group, known by its command."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            number = int(folder.name)
            ours = os.getpgid(number) == server.process.pid
            if ours and b"draftcore_sglang.writer" in (folder / "cmdline").read_bytes():
                return number
    raise AssertionError("the server has no writer")


def test_a_server_whose_writer_is_killed_at_work_starts_another(
    server: Serving, open_capture: OpenCapture, store: ShmStore
) -> None:
    capture, done, killed = open_capture(server, REQUEST), list[Delivered](), list[int]()
    with ThreadPoolExecutor(1) as thread:
        jobs = [
            thread.submit(lambda n: done.append(deliver(capture, store, n)), n) for n in range(12)
        ]
        while not jobs[-1].done():
            if len(killed) < 3 and len(done) > len(killed) * 3:
                with suppress(
                    AssertionError, OSError
                ):  # none is there: the next forward starts one
                    killed.append(writer_of(server))
                    os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.01)
    assert len(done) == 12
    assert len(killed) == len(set(killed)) > 1
    require_stored(store, *done)


def test_a_server_that_is_killed_at_work_is_waited_for_and_nothing_is_lost(
    server: Serving,
    start_server: StartServer,
    open_capture: OpenCapture,
    sink: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then its store is made anew under it, which a new run of the same name would do."""
    store = ShmStore.open(sink)
    capture = open_capture(server, REQUEST, patience=400)  # longer than a start
    with ThreadPoolExecutor(1) as thread:
        jobs = [thread.submit(deliver, capture, store, number) for number in range(40)]
        jobs[2].result()
        server.kill()
        before = sum(job.done() for job in jobs)
        again = start_server(port=server.port, DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,2")
        done = [job.result(400) for job in jobs]
    assert before < 40
    require_stored(store, *done)
    assert "others are asked meanwhile" in caplog.text
    assert store.stats().samples == 0

    store.path.unlink()
    anew = ShmStore.open(sink)
    require_stored(anew, deliver(capture, anew, 99))
    anew.close()
    assert again.alive
