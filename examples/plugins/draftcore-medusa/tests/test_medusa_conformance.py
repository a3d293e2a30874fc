"""The distribution, its plugin and its algorithm pass what every one of them must pass."""

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_medusa.plugin"


class TestAlgorithm(AlgorithmSuite):
    plugin = "draftcore_medusa.plugin"
