"""Drafts that cannot be sharded over ranks are named; what sharded ones train is seen by whole runs."""

import pytest
from draftcore_disagg.sharding import require_shardable
from torch import nn

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.errors import DraftcoreError


def test_a_weight_that_two_wrap_units_share_is_named() -> None:
    inner = nn.Linear(3, 3), nn.Linear(3, 3)
    inner[0].weight = inner[1].weight
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(*inner))

    def draft(*wrap_units: str) -> Draft:
        groups = [{"params": list(module.parameters())}]
        return Draft(module, {}, TrainingDefaults(1e-3, 0.0, 1.0), groups, wrap_units=wrap_units)

    require_shardable(draft("0", "1"))
    with pytest.raises(DraftcoreError, match=r"shared by the wrap units '1' and '1\.1'"):
        require_shardable(draft("1.1", "1"))
