"""Conformance suites for plugin authors: subclass one, name the plugin, and run pytest.

    from draftcore_sdk.stores import StoreSuite

    class TestMyStore(StoreSuite):
        plugin = "my_package.plugin"

There is a suite for the plugin itself (`plugins.PluginSuite`) and one for each kind of offer:
`algorithms.AlgorithmSuite`, `targets.TargetSuite`, `samples.SamplesSuite`, `captures.CaptureSuite`,
`stores.StoreSuite`, `evaluations.EvaluationSuite`, `batches.BatchesSuite`, `channels.ChannelSuite`,
`launchers.LauncherSuite`, `sources.SourceSuite`, `prompts.PromptsSuite`, `images.ImageSuite`,
`runners.RunnerSuite`, `engines.EngineSuite`, `graphs.GraphBackendSuite`,
`graph_plugins.GraphPluginSuite`; and two for what goes around an algorithm: `wrappers.WrapperSuite`,
`wrappers.ObserverSuite`. For an algorithm's own tests there is `algorithm_fixtures.ExportSuite`: what
reading an export refuses, and how servers read it.
`draftcore check-plugin NAME` runs all that apply, `draftcore new-plugin NAME` writes a plugin that
passes them. A suite opens everything through the plugin's hooks, as a run does.
"""

import sys

SUITES = (
    "algorithms", "batches", "captures", "channels", "engines", "evaluations", "graph_plugins",
    "graphs", "images", "launchers", "plugins", "prompts", "runners", "samples", "sources",
    "stores", "targets", "wrappers",
)  # fmt: skip
PARTS = ("algorithm_fixtures", "comparisons", "drafting", "workbench")

if "pytest" in sys.modules:  # asserts in a suite explain themselves as those of a test file do
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{n}" for n in (*SUITES, *PARTS)))
