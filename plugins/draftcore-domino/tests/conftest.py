"""Domino at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_domino.algorithm import Domino
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    layers = (1, 3, 4)
    backbone = {"num_layers": 2, "layers": layers, "block_size": 4, "num_anchors": 5}
    return Tiny(
        Domino,
        DominoOptions,
        {**backbone, "gru_hidden_dim": 12, "emb_dim": 6},
        features=[f"hidden.{layer}" for layer in layers],
        shape={"vocab_size": 270},
        std=0.4,
    )
