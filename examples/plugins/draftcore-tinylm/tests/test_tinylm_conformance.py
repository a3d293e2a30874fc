"""The distribution and its plugin pass what every one of them must pass."""

from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_tinylm.plugin"
