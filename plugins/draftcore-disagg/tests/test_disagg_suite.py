"""The dist passes what every plugin, and its queue what all batches must pass."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen

from draftcore_sdk.batches import BatchesSuite, by_producers
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_disagg.plugin"


class TestQueue(BatchesSuite):
    plugin = "draftcore_disagg.plugin"

    def producing(
        self, file: Path, plugins: Sequence[Path]
    ) -> AbstractContextManager[list[Popen[bytes]]]:
        return by_producers(file, plugins)
