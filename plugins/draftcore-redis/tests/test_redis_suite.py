"""The conformance suites, on a real server."""

from collections.abc import Sequence
from contextlib import closing

import pytest
from draftcore_redis.log import RedisLog
from draftcore_redis.server import Server
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.plugins import PluginSuite

from draftcore.channels.logged import Head


class TestRedisPlugin(PluginSuite):
    plugin = "draftcore_redis.plugin"


class TestRedisChannel(ChannelSuite):
    plugin = "draftcore_redis.plugin"

    @pytest.fixture
    def channel_uri(self, place: str) -> str:
        return place

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        server, _ = Server.parse(uri)
        with closing(RedisLog(server, "vandal")) as log:
            head = Head.of(log)
        assert head is not None
        with server.client() as client:
            for number, body in enumerate(bodies, 1):
                entry = {"writer": "vandal", "number": number, "record": body}
                client.xadd(f"{server.prefix}:mailbox:{head.session}", entry)

    def footprint(self, uri: str) -> int:
        server, _ = Server.parse(uri)
        with server.client() as client:
            return sum(
                client.memory_usage(key, samples=0) for key in client.keys(f"{server.prefix}:*")
            )
