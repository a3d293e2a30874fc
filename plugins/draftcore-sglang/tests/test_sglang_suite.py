"""The standard tests of a capture, with sglang in this process. One engine serves all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftcore.records import FeatureRequest
from draftcore.target import TargetSpec
from draftcore.testing.captures import (
    CaptureSuite,
    capture_target,
    features_of,
    group,
    open_through,
)

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]


class TestSglang(CaptureSuite):
    plugin = "draftcore_sglang.plugin"
    name = "sglang"
    options = {"max_tokens": 512}

    @pytest.fixture(scope="class", autouse=True)
    def one_engine(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """A capture that stays open: the tests' own ones share its engine."""
        folder = capture_target(tmp_path_factory.mktemp("sglang-suite"))
        target, request = TargetSpec(str(folder), device="cpu"), FeatureRequest((1,), True, "float32")
        kept = open_through(self.plugin, self.name, target, request, self.options)
        features_of(kept, group(0))
        type(self).folder = folder
        yield
        kept.close()

    @pytest.fixture
    def target_folder(self) -> Path:
        return self.folder
