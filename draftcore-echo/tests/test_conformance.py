"""What draftcore demands of every plugin and of every algorithm.

`draftcore check-plugin echo` runs the same suites.
"""

from draftcore.testing.algorithms import AlgorithmSuite
from draftcore.testing.plugins import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_echo.plugin"


class TestAlgorithm(AlgorithmSuite):
    plugin = "draftcore_echo.plugin"
