"""Capture `hf`: the conformance suite."""

from draftcore.testing.captures import CaptureSuite


class TestLocalCapture(CaptureSuite):
    plugin = "draftcore.builtin.hf"
