"""P-EAGLE at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_peagle.algorithm import PEagle
from draftcore_peagle.options import PEagleOptions
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny

from draftcore.contracts.algorithm import DataSummary

VOCAB = 48


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    return Tiny(
        PEagle,
        PEagleOptions,
        {"num_layers": 2, "num_depths": 4, "draft_vocab_size": 24, "mask_token_id": 5},
        features=["hidden.1", "hidden.3", "hidden.4", "last_hidden"],
        # Wider weights than usual: a flat teacher would hide mistakes.
        shape={"vocab_size": VOCAB, "eos_token_id": None, "pad_token_id": None, "std": 0.3},
        summary=DataSummary("", 1, 90, 90, 9, {token: 90 - token for token in range(0, VOCAB, 2)}),
        tokens=VOCAB,
    )
