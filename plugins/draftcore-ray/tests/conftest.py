"""A Ray cluster of two machines on loopback, and a small project to train there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others see


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two machines with four CPUs each, of which the second can be lost."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    here: dict[str, Any] = {"num_cpus": 4, "node_ip_address": LOOPBACK, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=here)
    yield made
    made.shutdown()
