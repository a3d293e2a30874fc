"""A real master and a lender of memory per file; each test has a name of its own on them.

Per file, as what a killed lender or writer leaves is the master's for a minute or two.

Mooncake's clients listen on all interfaces and cannot be told not to. So, where this process may,
the tests run in a network namespace that has only loopback, and what they start does as well.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from draftcore_mooncake.engine import PEER_TO_PEER, load, package_folder
from draftcore_mooncake.master import Master
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.loopback import only_loopback

LENT_BYTES = 48 << 20  # where a file does not say how many it needs
names = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def nobody_else() -> Iterator[None]:
    with only_loopback():
        yield


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    load()
    running = Master(package_folder())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def lender(master: Master, request: pytest.FixtureRequest) -> Iterator[MooncakeStore]:
    """The trainer's part: it lends the memory of all tests, and keeps a client open for them."""
    nbytes = getattr(request.module, "LENT_BYTES", LENT_BYTES)
    store = MooncakeStore.open(f"mooncake://{master.address}/lender?max_bytes={nbytes}")
    kept = MooncakeStore.open(store.uri)  # else each test's store would connect anew: 2 s
    yield store
    kept.close()
    store.close()


@pytest.fixture(scope="module")
def client(master: Master) -> Iterator[Any]:
    """A client of the library itself, to look at what stores do on the master, and to tidy up."""
    found = load().MooncakeDistributedStore()
    assert found.setup("127.0.0.1", PEER_TO_PEER, 0, 16 << 20, "tcp", "", master.address) == 0
    yield found
    found.close()


@pytest.fixture
def store_uri(lender: MooncakeStore, client: Any) -> Iterator[str]:
    """A producer's URI, with an empty name on the shared master."""
    name = f"test-{os.getpid()}-{next(names)}"
    yield lender.uri.replace("/lender", f"/{name}")
    client.remove_by_regex(f"^{name}/", True)


@pytest.fixture
def store(store_uri: str) -> Iterator[MooncakeStore]:
    opened = MooncakeStore.open(store_uri)
    yield opened
    opened.close()
