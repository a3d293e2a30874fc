"""Servers of several processes, servers without this dist, and servers that are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.captures import ALL, ROWS, Reference, batch, features_of, require_near
from draftcore_sdk.serving import Serving
from draftcore_sglang.client import Server
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture, receipt_of, request_body
from draftcore_sglang.wire import FIELD
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
StartServer = Callable[..., Serving]
AUX = (
    "--enable-return-aux-hidden-states",
    "--speculative-algorithm=DFLASH",
    "--return-aux-hidden-state-layer-ids",
    "2",
    "0",
)


def opened(
    server: Serving, target: TargetSpec, request: FeatureRequest, **options: Any
) -> ServerCapture:
    options = {"servers": [server.url], "patience": 20} | options
    return ServerCapture(target, request, ServerOptions(**options))


@pytest.mark.parametrize("size", ["--tp-size=2", "--dp-size=2"])
def test_a_server_of_two_schedulers_stores_each_sample_once(
    start_server: StartServer, sink: str, target: TargetSpec, served_folder: Path, size: str
) -> None:
    cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # else a NUMA node for each
    server = start_server(
        size,
        DRAFTCORE_SINK=sink,
        DRAFTCORE_LAYERS="0,1,2,3",
        SGLANG_CPU_OMP_THREADS_BIND=cores,
    )
    store, reference = ShmStore.open(sink), Reference(served_folder)
    capture = opened(server, target, ALL)
    found = features_of(capture, batch(*range(len(ROWS))))
    for features, tokens in zip(found, ROWS, strict=True):
        require_near(features["last_hidden"], reference.after_norm(tokens))
        require_near(features["hidden.3"], reference.before_norm(tokens))
        require_near(features["hidden.1"], reference.layers(tokens)[1])
    assert store.stats().samples == 0  # a second writer would have left one under the same id
    capture.close()
    server.kill()


def test_a_server_without_this_dist_sends_text_and_a_warning(
    start_server: StartServer,
    target: TargetSpec,
    served_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = start_server("--disable-radix-cache", *AUX)
    request, reference = FeatureRequest((0, 2), False, "float32"), Reference(served_folder)
    capture = opened(server, target, request)
    assert "does not run draftcore-sglang" in caplog.text
    for features, tokens in zip(features_of(capture, batch(0, 1)), ROWS, strict=False):
        assert set(features) == {"hidden.0", "hidden.2"}
        require_near(features["hidden.0"], reference.layers(tokens)[0])
        require_near(features["hidden.2"], reference.layers(tokens)[2])
    with pytest.raises(UsageError, match="max_json=2000"):
        features_of(opened(server, target, request, max_json=2000), batch(4))
    with pytest.raises(UsageError, match=r"layers \[0, 2\] and no others(.|\n)*DRAFTCORE_SINK"):
        opened(server, target, ALL)
    capture.close()
    server.kill()


def test_a_server_that_asks_the_model_for_layers_of_its_own_is_refused(
    start_server: StartServer, sink: str, target: TargetSpec
) -> None:
    server = start_server(*AUX, DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,9")
    body = request_body([5, 6, 7], {FIELD: {"about": True}})
    receipt = receipt_of(Server(server.url).post(body, 30))
    assert receipt is not None
    assert "DRAFTCORE_LAYERS has [9], the model has layers 0..3" in receipt["about"]["problem"]
    with pytest.raises(UsageError, match="cannot capture"):
        opened(server, target, ALL)
    server.kill()
