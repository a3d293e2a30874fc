"""How a step is dealt out to ranks, and which drafts cannot be sharded over them."""

import pytest
import torch
from torch import nn

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.errors import DraftcoreError
from draftcore.training.ranks import ALONE, Ranks
from draftcore.training.sharding import require_shardable


def dealt(size: int, total: int, batch: int) -> list[list[range]]:
    found = []
    for rank in range(size):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, size
        found.append(ranks.passes(total, batch))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [1, 2, 5, 8, 9, 64])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_every_sample_is_dealt_once_and_every_rank_has_as_many_passes(
    size: int, total: int, batch: int
) -> None:
    ranks = dealt(size, total, batch)
    assert sorted(at for passes in ranks for part in passes for at in part) == list(range(total))
    assert len({len(passes) for passes in ranks}) == 1
    assert all(len(part) <= batch for passes in ranks for part in passes)
    # No pass too many: rank 0, which has the most samples, has some in each.
    assert all(ranks[0])


def test_neighbours_in_length_go_to_different_ranks() -> None:
    assert [list(map(list, passes)) for passes in dealt(2, 7, 2)] == [
        [[0, 2], [4, 6]],
        [[1, 3], [5]],
    ]


def test_one_rank_takes_the_samples_in_order() -> None:
    assert list(map(list, ALONE.passes(5, 2))) == [[0, 1], [2, 3], [4]]


def draft(module: nn.Module, *wrap_units: str) -> Draft:
    defaults = TrainingDefaults(lr=1e-3, warmup_ratio=0.0, clip=1.0)
    groups = [{"params": list(module.parameters())}]
    return Draft(module, {}, defaults, groups, wrap_units=wrap_units)


def test_a_weight_that_two_wrap_units_share_is_named() -> None:
    inner = nn.Linear(3, 3), nn.Linear(3, 3)
    inner[0].weight = inner[1].weight
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(*inner))
    require_shardable(draft(module, "0", "1"))
    with pytest.raises(DraftcoreError, match=r"shared by the wrap units '1' and '1\.1'"):
        require_shardable(draft(module, "1.1", "1"))


def test_a_weight_without_a_dimension_is_named() -> None:
    module = nn.Linear(3, 3)
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(DraftcoreError, match="parameter scale has no dimension"):
        require_shardable(draft(module))
