"""The channel `tcp` passes the suite of all channels."""

from draftcore_disagg.tcp import TcpChannel
from draftcore_sdk.channels import ChannelSuite


class TestTcp(ChannelSuite):
    plugin, name = "draftcore_disagg.plugin", "tcp"

    def impatient(self, uri: str, secret: bytes, patience: float) -> TcpChannel:
        return TcpChannel.open(uri, secret, patience)
