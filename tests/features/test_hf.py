"""Capture `hf`: the conformance suite."""

from draftcore_sdk.captures import CaptureSuite


class TestLocalCapture(CaptureSuite):
    plugin = "draftcore.builtin"
