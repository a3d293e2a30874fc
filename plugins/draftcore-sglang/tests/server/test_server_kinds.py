"""Servers of several processes, servers without this dist, and servers that are refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from capturing import require_features
from draftcore_sdk.captures import ROWS, Reference, batch, features_of, require_near
from draftcore_sdk.serving import Serving
from draftcore_sglang.remote import ServerCapture
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
StartServer = Callable[..., Serving]
OpenCapture = Callable[..., ServerCapture]
AUX = (
    "--enable-return-aux-hidden-states",
    "--speculative-algorithm=DFLASH",
    "--return-aux-hidden-state-layer-ids",
    "2",
    "0",
)


@pytest.mark.parametrize("size", ["--tp-size=2", "--dp-size=2"])
def test_a_server_of_two_schedulers_stores_each_sample_once(
    start_server: StartServer,
    open_capture: OpenCapture,
    sink: str,
    store: ShmStore,
    served_folder: Path,
    size: str,
) -> None:
    """A second writer would leave a sample under the same id, which the store would show."""
    cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # else a NUMA node for each
    layers = {"DRAFTCORE_LAYERS": "0,1,2,3", "SGLANG_CPU_OMP_THREADS_BIND": cores}
    server = start_server(size, DRAFTCORE_SINK=sink, **layers)
    found = features_of(open_capture(server), batch(*range(len(ROWS))))
    for features, tokens in zip(found, ROWS, strict=True):
        require_features(features, tokens, Reference(served_folder))
    server.kill()


def test_a_server_without_this_dist_sends_text_and_a_warning(
    start_server: StartServer,
    open_capture: OpenCapture,
    served_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = start_server("--disable-radix-cache", *AUX)
    request, reference = FeatureRequest((0, 2), False, "float32"), Reference(served_folder)
    found = features_of(open_capture(server, request), batch(0, 1))
    assert "does not run draftcore-sglang" in caplog.text
    for features, tokens in zip(found, ROWS, strict=False):
        assert set(features) == {"hidden.0", "hidden.2"}
        for name in features:
            require_near(features[name], reference.features(tokens)[name])
    with pytest.raises(UsageError, match="max_json=2000"):
        features_of(open_capture(server, request, max_json=2000), batch(4))
    with pytest.raises(UsageError, match=r"layers \[0, 2\] and no others(.|\n)*DRAFTCORE_SINK"):
        open_capture(server)
    server.kill()


def test_a_server_that_asks_the_model_for_layers_of_its_own_is_refused(
    start_server: StartServer, open_capture: OpenCapture, sink: str
) -> None:
    server = start_server(*AUX, DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,9")
    problem = r"cannot capture: DRAFTCORE_LAYERS has \[9\], the model has layers 0\.\.3"
    with pytest.raises(UsageError, match=problem):
        open_capture(server)
    server.kill()
