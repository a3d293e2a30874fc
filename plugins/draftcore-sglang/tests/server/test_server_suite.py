"""The standard of a capture backend, through a server that batches nothing.

`--prefill-max-requests=1` makes each prompt a forward of its own, so that captures repeat bit for
bit. What a server's own batching changes is tested in `test_served`.
"""

from collections.abc import Callable, Iterator

import pytest
from draftcore_sdk.captures import CaptureSuite
from draftcore_sdk.serving import Serving

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]


@pytest.fixture(scope="module", autouse=True)
def served(start_server: Callable[..., Serving], sink: str) -> Iterator[None]:
    server = start_server(
        "--prefill-max-requests=1", DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,1,2,3"
    )
    TestSglangServer.options = {"servers": [server.url], "patience": 30}
    yield
    assert server.alive


class TestSglangServer(CaptureSuite):
    plugin = "draftcore_sglang.plugin"
    name = "sglang-server"
