"""The distribution and its plugin pass what every plugin must pass."""

from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_eagle3.plugin"
