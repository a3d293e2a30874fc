"""MTP at a size for tests, and the fixtures that are made of it: the target is a Qwen3.5."""

import pytest
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.options import MtpOptions
from draftcore_sdk.algorithm_fixtures import (  # noqa: F401
    Tiny,
    draft,
    exported,
    folder,
    make_draft,
    make_samples,
    make_target,
    target,
)


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    return Tiny(
        Mtp,
        MtpOptions,
        {"init": "fresh"},
        features=["last_hidden"],
        shape={"family": "qwen3_5", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    )
