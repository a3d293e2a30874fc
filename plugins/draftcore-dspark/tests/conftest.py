"""DSpark at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_dspark.algorithm import DSpark
from draftcore_dspark.options import DSparkOptions
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    layers = (1, 3, 4)
    small = {"num_layers": 2, "layers": layers, "block_size": 4, "num_anchors": 5, "markov_rank": 6}
    features = [*(f"hidden.{layer}" for layer in layers), "last_hidden"]
    return Tiny(DSpark, DSparkOptions, small, features, shape={"vocab_size": 270}, std=0.4)
