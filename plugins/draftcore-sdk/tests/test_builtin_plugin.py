"""The built-in plugin passes what every plugin must pass, and its runner what every runner must."""

from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite


class TestBuiltin(PluginSuite):
    plugin = "draftcore.builtin"


class TestEager(RunnerSuite):
    plugin = "draftcore.builtin"
