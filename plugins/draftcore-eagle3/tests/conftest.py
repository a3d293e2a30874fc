"""EAGLE-3 at a size for tests, and the fixtures that are made of it."""

import pytest
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_fixtures import *  # noqa: F403
from draftcore_sdk.algorithm_fixtures import Tiny

from draftcore.contracts.algorithm import DataSummary

VOCAB = 48


@pytest.fixture(scope="session")
def algorithm() -> Tiny:
    return Tiny(
        Eagle3,
        Eagle3Options,
        {"ttt_length": 3},
        features=["hidden.1", "hidden.3", "hidden.4", "last_hidden"],
        # Wider weights than usual: a flat teacher would hide mistakes.
        shape={
            "vocab_size": VOCAB, "eos_token_id": None, "pad_token_id": None, "seed": 1, "std": 0.3,
        },
        summary=DataSummary("", 1, 90, 90, 9, {token: 90 - token for token in range(0, VOCAB, 2)}),
        tokens=VOCAB,
    )  # fmt: skip
