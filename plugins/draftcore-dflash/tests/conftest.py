"""DFlash at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    layers = (1, 3, 4)
    return Tiny(
        DFlash,
        DFlashOptions,
        {"num_layers": 2, "layers": layers, "block_size": 4, "num_anchors": 5},
        features=[*(f"hidden.{layer}" for layer in layers), "last_hidden"],
        shape={"vocab_size": 270},
    )
