"""What breaks while a server captures: the server itself, and the store under it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_sdk.captures import batch
from draftcore_sdk.serving import Serving
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.store import SampleRef
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError

pytestmark = pytest.mark.sglang
REQUEST = FeatureRequest((0, 2), True, "float32")
StartServer = Callable[..., Serving]
Delivered = tuple[Sequence[SampleRef], list[list[int]]]  # and the tokens of each


@pytest.fixture(scope="module")
def server(start_server: StartServer, sink: str) -> Serving:
    return start_server(DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,2")


def opened(server: Serving, target: TargetSpec, **options: Any) -> ServerCapture:
    options = {"servers": [server.url], "self_test": False} | options
    return ServerCapture(target, REQUEST, ServerOptions(**options))


def deliver(capture: ServerCapture, store: ShmStore, number: int) -> Delivered:
    """A batch of eight, told apart by its tokens."""
    members = [[10 + row, *range(30, 90), number] for row in range(8)]
    ids = tuple(f"{number:020x}{row:04x}" for row in range(8))
    asked = replace(batch(members=members, index=number), ids=ids)
    beside = [{"token_ids": torch.tensor(member)} for member in members]
    return capture.deliver(asked, beside, "made so", store), members


def require_stored(store: ShmStore, refs: Sequence[SampleRef], members: list[list[int]]) -> None:
    for ref, member in zip(refs, members, strict=True):
        with store.get(ref) as handle:
            assert handle.tensors["token_ids"].tolist() == member
            assert {len(handle.tensors[name]) for name in REQUEST.names} == {len(member)}


def test_a_server_that_hangs_is_given_up_when_patience_ends(
    server: Serving, sink: str, target: TargetSpec
) -> None:
    opened(server, target).close()  # a server's first answer may take it more than a second
    store, capture = ShmStore.open(sink), opened(server, target, timeout=1, patience=3)
    server.kill(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DraftcoreError, match=server.url):
        deliver(capture, store, 1)
    assert 2 < time.monotonic() - began < 12
    server.kill(signal.SIGCONT)
    deadline = time.monotonic() + 30  # what it had been asked for may be stored now
    while time.monotonic() < deadline:
        try:
            refs, members = deliver(capture, store, 1)
            break
        except DraftcoreError:
            time.sleep(1)
    require_stored(store, refs, members)
    store.free(refs)
    capture.close()
    store.close()


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
    server: Serving, sink: str, target: TargetSpec
) -> None:
    store, capture = ShmStore.open(sink), opened(server, target)
    done, killed = [deliver(capture, store, 0)], list[int]()

    def work() -> None:
        for number in range(1, 12):
            done.append(deliver(capture, store, number))

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        if len(killed) < 3 and len(done) > len(killed) * 3:
            with suppress(AssertionError, OSError):  # none is there: the next forward starts one
                killed.append(writer_of(server))
                os.kill(killed[-1], signal.SIGKILL)
        time.sleep(0.01)
    assert len(done) == 12
    assert len(killed) == len(set(killed)) > 1
    for refs, members in done:
        require_stored(store, refs, members)
        store.free(refs)
    capture.close()
    store.close()


def test_a_server_that_is_killed_at_work_is_waited_for_and_nothing_is_lost(
    server: Serving,
    start_server: StartServer,
    sink: str,
    target: TargetSpec,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then its store is made anew under it, which a new run of the same name would do."""
    store = ShmStore.open(sink)
    capture = opened(server, target, patience=400)  # longer than a start
    done: list[Delivered] = []
    problems: list[Exception] = []

    def work() -> None:
        try:
            for number in range(40):
                done.append(deliver(capture, store, number))
        except Exception as error:
            problems.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    while len(done) < 3:
        time.sleep(0.01)
    server.kill()
    before = len(done)
    again = start_server(port=server.port, DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,2")
    worker.join(400)
    assert not problems
    assert before < len(done) == 40
    for refs, members in done:
        require_stored(store, refs, members)
    assert "others are asked meanwhile" in caplog.text
    store.free(ref for refs, _ in done for ref in refs)
    assert store.stats().samples == 0

    store.path.unlink()
    anew = ShmStore.open(sink)
    refs, members = deliver(capture, anew, 99)
    require_stored(anew, refs, members)
    anew.free(refs)
    anew.close()
    capture.close()
    assert again.alive
