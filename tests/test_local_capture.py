"""Capture `hf`: the conformance suite, and how it explains a feature that overflows."""

import pytest

from draftcore.errors import DraftcoreError
from draftcore.local_capture import LocalCapture
from draftcore.records import FeatureRequest
from draftcore.target import TargetSpec
from draftcore.testing.captures import LOUD, CaptureSuite, group


class TestLocalCapture(CaptureSuite):
    plugin = "draftcore.builtin.hf"

    def test_an_overflow_names_sample_and_remedy(self, target: TargetSpec) -> None:
        capture = LocalCapture(target, FeatureRequest((0,), False, "float16"))
        with pytest.raises(DraftcoreError, match="sample-42") as error:
            list(capture.features([group(members=[[LOUD]], rows=(42,))]))
        assert "capture.dtype=float32" in str(error.value)
