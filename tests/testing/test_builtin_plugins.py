"""Our built-in plugins, all of them, pass what every plugin must pass."""

from draftcore.dists import BUILT_IN
from draftcore.testing.plugins import PluginSuite

from draftcore.plugins import load

BUILT_INS = {p.name: p.module for p in load().plugins if p.dist == BUILT_IN}
for _name, _module in BUILT_INS.items():
    _test = f"Test{_name.title()}"
    globals()[_test] = type(_test, (PluginSuite,), {"plugin": _module})


def test_there_is_a_suite_for_each() -> None:
    assert BUILT_INS.keys() >= {"authors", "file", "hf", "memory", "work"}
    assert {f"Test{name.title()}" for name in BUILT_INS} <= globals().keys()
