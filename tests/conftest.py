"""Fixtures that several folders share."""

from pathlib import Path

import pytest
from draftcore_sdk.targets import tiny_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))
