"""Capture `hf`: the conformance suite, and that it checks its target when it is opened."""

from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.captures import ALL, CaptureSuite

from draftcore.errors import UsageError
from draftcore.features.hf import LocalCapture
from draftcore.target import TransformersTarget


class TestLocalCapture(CaptureSuite):
    plugin = "draftcore.builtin"

    def test_a_model_that_scales_its_logits_is_refused_before_any_batch(
        self, target_folder: Path
    ) -> None:
        target = TransformersTarget(str(target_folder), device="cpu")
        model = target.model.model
        true = model.forward

        def scaled(*given: Any, **named: Any) -> Any:
            output = true(*given, **named)
            output.logits = output.logits * 2
            return output

        model.forward = scaled
        with pytest.raises(UsageError, match="computes its logits in a way"):
            LocalCapture(target, ALL)
