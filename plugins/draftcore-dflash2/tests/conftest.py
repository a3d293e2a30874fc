"""DFlash2 at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_dflash2.algorithm import DFlash2
from draftcore_dflash2.options import DFlash2Options
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    layers = (1, 3, 4)
    backbone = {"num_layers": 2, "layers": layers, "block_size": 4, "num_anchors": 5}
    own = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
    return Tiny(
        DFlash2,
        DFlash2Options,
        {**backbone, **own},
        features=[*(f"hidden.{layer}" for layer in layers), "last_hidden"],
        shape={"vocab_size": 270},
        std=0.3,
    )
