"""The built-in channel `tcp` passes the suite of all channels."""

from draftcore_sdk.channels import ChannelSuite

from draftcore_disagg.tcp import TcpChannel


class TestTcp(ChannelSuite):
    plugin, name = "draftcore.builtin", "tcp"

    def impatient(self, uri: str, secret: bytes, patience: float) -> TcpChannel:
        return TcpChannel.open(uri, secret, patience)
