"""MTP at a size for tests, and the fixtures that are made of it: the target is a Qwen3.5."""

import pytest
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.options import MtpOptions
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    shape = {"family": "qwen3_5_text", "num_hidden_layers": 2, "rope_parameters": HALF}
    layers = ["full_attention"] * 2  # of the target: the MTP layer is one of these
    small = {"init": "fresh", "num_drafts": 4}
    return Tiny(Mtp, MtpOptions, small, ["last_hidden"], {**shape, "layer_types": layers})
