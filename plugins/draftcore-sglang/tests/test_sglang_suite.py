"""The standard tests of a capture, with sglang in this process. One engine serves all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import CaptureSuite, capture_target
from draftcore_sdk.suite import opened

from draftcore.contracts.capture import FeatureRequest

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]


PLUGIN, NAME, OPTIONS = "draftcore_sglang.plugin", "sglang", {"max_tokens": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The target, which a capture that stays open holds: the tests' own ones share its engine."""
    written = capture_target(tmp_path_factory.mktemp("target"))
    target, request = (
        TransformersTarget(str(written), device="cpu"),
        FeatureRequest((1,), True, "float32"),
    )
    kept = opened(PLUGIN, "capture", NAME, OPTIONS, target=target, request=request)
    yield written
    kept.close()


class TestSglang(CaptureSuite):
    plugin, name, options = PLUGIN, NAME, OPTIONS

    @pytest.fixture
    def target_folder(self, folder: Path) -> Path:
        return folder
