"""The dist passes what every plugin must, and its evaluation and runner what every one of their kind must."""

from typing import ClassVar

from draftcore_sdk.evaluations import EvaluationSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.runners import RunnerSuite


class TestPlugin(PluginSuite):
    plugin = "draftcore_eval.plugin"


class TestDecoding(EvaluationSuite):
    plugin = "draftcore_eval.plugin"
    options: ClassVar = {"max_new_tokens": 8, "batch": 2}


class TestEager(RunnerSuite):
    plugin = "draftcore_eval.plugin"
