"""Real servers on loopback, unmodified sglang on the CPU: what they capture, store and refuse.

A server takes some 20 seconds to come up. One with a class serves its tests.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import (
    FAMILIES,
    batch_about,
    losses,
    require_features,
    seeing_qwen,
    target_that_sees,
    write_run,
)
from draftcore_disagg.local import free_port
from draftcore_file.store import FileStore
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import (
    ALL,
    ROWS,
    CaptureSuite,
    Reference,
    batch,
    capture_target,
    features_of,
    require_near,
)
from draftcore_sdk.loopback import only_loopback
from draftcore_sdk.serving import Serving
from draftcore_sdk.suite import child_environment
from draftcore_sglang.client import Server
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture, receipt_of, request_body
from draftcore_sglang.wire import FIELD, Ask
from sglang_on_cpu import ARGUMENTS, flags

import draftcore
from draftcore.contracts.capture import CaptureBatch, FeatureRequest
from draftcore.contracts.store import SampleRef, StoreFull, StoreItem
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang

StartServer = Callable[..., Serving]
LONG = [list(range(3, 103)), [7] * 41, list(range(50, 83))]
EVERY_LAYER = {"DRAFTCORE_LAYERS": "0,1,2,3"}


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture_target(tmp_path_factory.mktemp("served"), "qwen3")


@pytest.fixture(scope="class")
def start(tmp_path_factory: pytest.TempPathFactory, served_folder: Path) -> Iterator[StartServer]:
    """Start servers of the suite's target; all end with the class, or the test."""
    started: list[Serving] = []

    def start_one(*args: str, port: int = 0, **environment: str) -> Serving:
        port = port or free_port()
        where = {"model_path": served_folder, "host": "127.0.0.1", "port": port}
        command = [sys.executable, "-m", "sglang.launch_server", *flags({**where, **ARGUMENTS})]
        settings: dict[str, Any] = {"SGLANG_PLATFORM": "draftcore_cpu", **environment}
        log = tmp_path_factory.mktemp("server") / "log"
        started.append(Serving([*command, *args], port, log, **settings))
        return started[-1]

    yield start_one
    for server in started:
        server.kill()


@pytest.fixture(scope="class")
def sink() -> Iterator[str]:
    """A store in shared memory, open for as long as the servers run."""
    uri = f"file:/dev/shm/test-{uuid.uuid4().hex}?volatile=yes&max_bytes={8 << 20}"
    store = FileStore.open(uri)
    yield uri
    store.close()
    shutil.rmtree(store.folder, ignore_errors=True)  # a server's writer may have it open still


@dataclass
class Rig:
    """A run's side: servers that are started for it, their store as its own, captures, the target."""

    start: StartServer
    sink: str
    store: FileStore
    folder: Path
    opened: list[ServerCapture]

    def target(self) -> TransformersTarget:
        return TransformersTarget(str(self.folder), device="cpu")

    def open(
        self, server: Serving, request: FeatureRequest = ALL, target: Any = None, **options: Any
    ) -> ServerCapture:
        given = {"servers": [server.url], "patience": 30, "self_test": False} | options
        asked = target or self.target(), request, ServerOptions(**given)
        self.opened.append(ServerCapture(*asked))
        return self.opened[-1]


@pytest.fixture
def rig(start: StartServer, sink: str, served_folder: Path) -> Iterator[Rig]:
    """Each test frees what it captures."""
    rig = Rig(start, sink, FileStore.open(sink), served_folder, [])
    yield rig
    for capture in rig.opened:
        capture.close()
    assert rig.store.stats().samples == 0
    rig.store.close()


def deliver(capture: ServerCapture, store: Any, asked: CaptureBatch) -> tuple[SampleRef, ...]:
    """Have a batch stored, as producers do, with its tokens; every third is to be learned."""
    assert capture.reaches(store)
    text = [
        {"token_ids": torch.tensor(tokens), "loss_mask": torch.arange(len(tokens)) % 3 == 0}
        for tokens in asked.token_ids
    ]
    return capture.deliver(asked, text, "made so", store)


def require_stored(
    store: Any, refs: Sequence[SampleRef], asked: CaptureBatch, reference: Reference | None = None
) -> None:
    """The batch is there, sample by sample, with transformers' features; and free it."""
    for ref, tokens in zip(refs, asked.token_ids, strict=True):
        assert (ref.provenance, ref.tokens) == ("made so", len(tokens))
        with store.get(ref) as handle:
            assert handle.tensors["token_ids"].tolist() == list(tokens)
            assert handle.tensors["loss_mask"].tolist() == [t % 3 == 0 for t in range(len(tokens))]
            assert {len(value) for value in handle.tensors.values()} == {len(tokens)}
            if reference:
                require_features(handle.tensors, tokens, reference)
    store.free(refs)


def with_ids(members: Sequence[Sequence[int]], number: int = 0) -> CaptureBatch:
    ids = tuple(f"{number:020x}{row:04x}" for row in range(len(members)))
    return replace(batch(members=members, index=number), ids=ids)


@pytest.mark.smoke
class TestSglangServer(CaptureSuite):
    """Each prompt is a forward of its own, so that captures repeat bit for bit."""

    plugin = "draftcore_sglang.plugin"
    name, limit = "sglang-server", 600  # a server starts

    @pytest.fixture
    def target_folder(self, served_folder: Path) -> Path:
        return served_folder

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls, start: StartServer, sink: str) -> Iterator[None]:
        whole = "--prefill-max-requests=1", "--context-length=1024"
        server = start(*whole, DRAFTCORE_SINK=sink, **EVERY_LAYER)
        cls.options = {"servers": [server.url], "patience": 30}
        yield
        assert server.alive


class TestAServerThatBatchesChunksAndCachesAsItLikes:
    """A chunk has 16 tokens, so that whatever shortens a capture is there."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, start: StartServer, sink: str) -> Iterator[Serving]:
        server = start("--chunked-prefill-size=16", DRAFTCORE_SINK=sink, **EVERY_LAYER)
        yield server
        assert server.alive

    def test_prompts_are_captured_whole_also_if_they_were_seen_before(
        self, server: Serving, rig: Rig
    ) -> None:
        """Chunked prefill returns the last chunk's rows alone, a cached prefix none."""
        reference, capture = Reference(rig.folder), rig.open(server)
        for _ in range(2):
            found = features_of(capture, batch(members=[*LONG, *ROWS]))
            for features, tokens in zip(found, [*LONG, *ROWS], strict=True):
                require_features(features, tokens, reference)

    def test_a_request_whose_prefix_is_cached_is_refused_and_answered_as_ever(
        self, server: Serving, rig: Rig
    ) -> None:
        """A client of another make, that sends no key of its own."""
        ask = Ask("ab" * 12, ("hidden.1",), "float32", "p", {})
        body = request_body(LONG[1], {FIELD: ask.to_json()})
        del body["extra_key"]
        first, second = (Server(server.url).post(body, 30) for _ in range(2))
        rig.store.free(rig.store.lookup([ask.sample]).values())
        assert "ref" in (receipt_of(first) or {})
        receipt = receipt_of(second) or {}
        assert receipt["error"] == "short"
        assert "prefix cache" in receipt["reason"]
        assert len(second["output_ids"]) == 1

    def test_a_request_without_the_field_is_answered_as_ever(
        self, server: Serving, rig: Rig
    ) -> None:
        body = request_body(LONG[2], {})
        body["sampling_params"]["max_new_tokens"] = 6
        alone = Server(server.url).post(body, 30)
        beside: list[Any] = []
        thread = threading.Thread(target=lambda: beside.append(Server(server.url).post(body, 30)))
        thread.start()
        features_of(rig.open(server), batch(members=LONG))
        thread.join()
        assert receipt_of(alone) is None
        assert alone["output_ids"] == beside[0]["output_ids"]

    def test_a_server_of_other_weights_is_refused(
        self, server: Serving, rig: Rig, tmp_path: Path
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(rig.folder)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
        model.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(rig.folder).save_pretrained(tmp_path)
        other = TransformersTarget(str(tmp_path), device="cpu")
        says = rf"{server.url} does not predict as(.|\n)*other weights"
        with pytest.raises(UsageError, match=says):
            rig.open(server, ALL, other, self_test=True)

    def test_samples_go_straight_into_the_runs_store_and_a_full_one_pushes_back(
        self, server: Serving, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It keeps nothing of the batch then."""
        opened: list[str] = []
        monkeypatch.setattr("draftcore_sglang.remote.open_store", opened.append)
        asked, capture, store = with_ids([*LONG, *ROWS]), rig.open(server), rig.store
        ballast = StoreItem(
            "ff" * 12, {"x": torch.zeros(8128 << 10, dtype=torch.uint8)}, 8128 << 10
        )
        full = store.put(ballast)
        with pytest.raises(StoreFull):
            deliver(capture, store, asked)
        assert store.lookup(asked.ids) == {}
        store.free([full])
        refs = deliver(capture, store, asked)
        assert store.lookup(asked.ids) == {ref.feature_id: ref for ref in refs}
        require_stored(store, refs, asked, Reference(rig.folder))
        assert opened == []  # nothing was read here


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_go_into_the_runs_store_as_transformers_has_them(
    family: str, rig: Rig, tmp_path: Path
) -> None:
    """Also a second time, when the server has seen them. Measured in fp32: 4e-6 at most.

    A chunk has 8 tokens, so that prefill is cut within an image, and the prefix cache is on.
    """
    folder, request = (
        seeing_qwen(tmp_path / "target", family),
        FeatureRequest((0, 2, 5), True, "float32"),
    )
    target, given = target_that_sees(folder), (f"--model-path={folder}", "--chunked-prefill-size=8")
    server = rig.start(*given, DRAFTCORE_SINK=rig.sink, DRAFTCORE_LAYERS="0,2,5")
    asked = batch_about(tmp_path, target)
    (expected,) = LocalCapture(target, request).features([asked])
    capture = rig.open(server, request, target, self_test=True)
    for _ in range(2):
        refs = deliver(capture, rig.store, asked)
        for ref, features in zip(refs, expected.features, strict=True):
            with rig.store.get(ref) as handle:
                for name, value_TH in features.items():
                    found_TH = handle.tensors[name]
                    torch.testing.assert_close(found_TH, value_TH, rtol=0, atol=2e-5)
        require_stored(rig.store, refs, asked)
    assert server.alive


# ---------------------------------------------------------------- servers of other kinds


@pytest.mark.parametrize("size", ["--tp-size=2", "--dp-size=2"])
def test_a_server_of_two_schedulers_stores_each_sample_once(rig: Rig, size: str) -> None:
    """A second writer would leave a sample under the same id, which the store would show."""
    cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # else a NUMA node for each
    environment = {**EVERY_LAYER, "SGLANG_CPU_OMP_THREADS_BIND": cores}
    server = rig.start(size, DRAFTCORE_SINK=rig.sink, **environment)
    found = features_of(rig.open(server), batch(*range(len(ROWS))))
    for features, tokens in zip(found, ROWS, strict=True):
        require_features(features, tokens, Reference(rig.folder))


AUX = ["--enable-return-aux-hidden-states", "--speculative-algorithm=DFLASH"]
AUX += ["--return-aux-hidden-state-layer-ids", "2", "0"]


def test_a_server_without_this_dist_sends_text_and_a_warning(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    server = rig.start("--disable-radix-cache", *AUX)
    request, reference = FeatureRequest((0, 2), False, "float32"), Reference(rig.folder)
    found = features_of(rig.open(server, request), batch(0, 1))
    assert "does not run draftcore-sglang" in caplog.text
    for features, tokens in zip(found, ROWS, strict=False):
        assert set(features) == {"hidden.0", "hidden.2"}
        for name in features:
            require_near(features[name], reference.features(tokens)[name])
    with pytest.raises(UsageError, match="max_json=2000"):
        features_of(rig.open(server, request, max_json=2000), batch(4))
    with pytest.raises(UsageError, match=r"layers \[0, 2\] and no others(.|\n)*DRAFTCORE_SINK"):
        rig.open(server)


def test_a_server_that_asks_the_model_for_layers_of_its_own_is_refused(rig: Rig) -> None:
    server = rig.start(*AUX, DRAFTCORE_SINK=rig.sink, DRAFTCORE_LAYERS="0,9")
    problem = r"cannot capture: DRAFTCORE_LAYERS has \[9\], the model has layers 0\.\.3"
    with pytest.raises(UsageError, match=problem):
        rig.open(server)


def test_a_server_puts_into_mooncake_what_transformers_computes(rig: Rig) -> None:
    """The trainer lends the memory, the server is a writer."""
    engine = pytest.importorskip("draftcore_mooncake.engine")
    from draftcore_mooncake.master import Master
    from draftcore_mooncake.store import MooncakeStore

    with only_loopback():
        engine.load()
        master = Master(engine.package_folder())
        uri = f"mooncake://{master.address}/served"
        trainer = MooncakeStore.open(f"{uri}?max_bytes={64 << 20}")
        environment = {**EVERY_LAYER, "MC_LOG_LEVEL": "ERROR"}
        server = rig.start(DRAFTCORE_SINK=f"{uri}?patience=5", **environment)
        capture, asked = rig.open(server, patience=60, self_test=True), with_ids(ROWS)
        refs = deliver(capture, trainer, asked)
        require_stored(trainer, refs, asked, Reference(rig.folder))
        assert trainer.lookup(asked.ids) == {}
        capture.close()
        server.kill()
        trainer.close()
        master.stop()


def test_a_run_trains_on_what_a_server_stored(rig: Rig, tmp_path: Path) -> None:
    """A trainer and two producers, as with transformers in the trainer: in the plan's order."""
    store = f"file:/dev/shm/test-{uuid.uuid4().hex}?volatile=yes&max_bytes=64MiB"
    server = rig.start(DRAFTCORE_SINK=store, DRAFTCORE_LAYERS="0,1,2")
    options = {"servers": [server.url], "self_test": False}
    changes = {"capture": {"name": "sglang-server", "options": options}, "store": store}
    ours = write_run(tmp_path / "server", rig.folder, topology={"producers": 2}, **changes)
    # Executed, where other tests fork: on the CPU torchvision is mended in each process.
    environment = {**child_environment(), "TESTS_EXECUTE": "1"}
    if importlib.util.find_spec("draftcore_sglang_cpu"):
        mend = "import draftcore_sglang_cpu\ndraftcore_sglang_cpu.mend_torchvision()\n"
        (tmp_path / "sitecustomize.py").write_text(mend)
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "draftcore", "train", str(ours)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pass through this process" not in done.stderr
    assert "POST /generate" in server.log.read_text()
    assert server.alive
    draftcore.train(theirs := write_run(tmp_path / "hf", rig.folder))
    # Features differ by 1e-6; losses of about 5 by 1e-6 of their size.
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)


# ---------------------------------------------------------------- what breaks at work


def writer_of(server: Serving) -> int:
    """The process beside the scheduler that puts: of the server's group, known by its command."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            number = int(folder.name)
            ours = os.getpgid(number) == server.process.pid
            if ours and b"draftcore_sglang.writer" in (folder / "cmdline").read_bytes():
                return number
    raise AssertionError("the server has no writer")


def test_a_server_that_is_killed_at_work_is_waited_for_and_its_writer_is_started_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost. Then its store is made anew under it, as a new run of the same name would do."""
    settings, store = {"DRAFTCORE_SINK": rig.sink, "DRAFTCORE_LAYERS": "0,2"}, rig.store
    server = rig.start(**settings)
    # Patience is longer than a start.
    capture = rig.open(server, FeatureRequest((0, 2), True, "float32"), patience=400)
    batches = [
        with_ids([[10 + row, *range(30, 90), number] for row in range(8)], number)
        for number in range(52)
    ]
    done, killed = list[tuple[Sequence[SampleRef], CaptureBatch]](), list[int]()

    def work(asked: CaptureBatch) -> None:
        done.append((deliver(capture, store, asked), asked))

    with ThreadPoolExecutor(1) as thread:
        jobs = [thread.submit(work, asked) for asked in batches[:12]]
        while not jobs[-1].done():
            if len(killed) < 3 and len(done) > len(killed) * 3:
                # Where none is there, the next forward starts one.
                with suppress(AssertionError, OSError):
                    killed.append(writer_of(server))
                    os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.01)
        assert (len(done), len(killed) == len(set(killed)) > 1) == (12, True)
        for refs, asked in done:
            require_stored(store, refs, asked)
        done.clear()
        jobs = [thread.submit(work, asked) for asked in batches[12:]]
        jobs[2].result()
        server.kill()
        before = len(done)
        again = rig.start(port=server.port, **settings)
        jobs[-1].result(400)
    assert before < len(done) == 40
    assert "others are asked meanwhile" in caplog.text
    for refs, asked in done:
        require_stored(store, refs, asked)
    assert store.stats().samples == 0

    shutil.rmtree(store.folder)
    store.close()
    rig.store = FileStore.open(rig.sink)
    require_stored(rig.store, deliver(capture, rig.store, batches[0]), batches[0])
    assert again.alive
