"""The core's own plugin passes what every plugin must pass."""

from draftcore_sdk.plugins import PluginSuite


class TestBuiltin(PluginSuite):
    plugin = "draftcore.verbs"
