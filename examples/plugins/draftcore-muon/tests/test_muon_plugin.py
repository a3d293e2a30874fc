"""The distribution and its plugin pass what every one of them must pass."""

from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.wrappers import WrapperSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_muon.plugin"


class TestAroundAnAlgorithm(WrapperSuite):
    plugin = "draftcore_muon.plugin"
