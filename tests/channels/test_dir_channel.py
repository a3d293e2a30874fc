"""The channel `dir`: the conformance suite, and what is its own."""

from collections.abc import Sequence
from pathlib import Path

from draftcore.channels.dir import DirLog
from draftcore.channels.logged import Head
from draftcore.testing.channels import ChannelSuite


class TestDirChannel(ChannelSuite):
    plugin = "draftcore.builtin.dir"

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        folder = Path(uri.removeprefix("dir:"))
        log = DirLog(folder, "vandal")
        head = Head.of(log)
        log.close()
        assert head is not None
        file = folder / "mailboxes" / head.session / "vandal.00000001.jsonl"
        file.write_bytes(b"\n".join(bodies) + b"\n")
