"""The dist passes what every plugin, and its samples what all samples must pass."""

from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.samples import SamplesSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_data.plugin"


class TestConversations(SamplesSuite):
    plugin = "draftcore_data.plugin"
