"""The dist passes what every plugin, and its target what every target must pass."""

from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import TargetSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_hf.plugin"


class TestTarget(TargetSuite):
    plugin = "draftcore_hf.plugin"
