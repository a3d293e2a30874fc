"""The dist passes what every plugin, and its queue what all batches must pass; secrets, and shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen

import pytest
from draftcore_disagg.secret import secret
from draftcore_disagg.sharding import require_shardable
from draftcore_sdk.batches import BatchesSuite, by_producers
from draftcore_sdk.plugins import PluginSuite
from torch import nn

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.errors import DraftcoreError, UsageError


class TestPlugin(PluginSuite):
    plugin = "draftcore_disagg.plugin"


class TestQueue(BatchesSuite):
    plugin = "draftcore_disagg.plugin"

    def producing(
        self, file: Path, plugins: Sequence[Path]
    ) -> AbstractContextManager[list[Popen[bytes]]]:
        return by_producers(file, plugins)


def test_a_secret_is_made_once_and_one_that_can_be_guessed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTCORE_SECRET", raising=False)
    assert secret(tmp_path) == secret(tmp_path)
    assert len(secret(tmp_path)) == 64
    for short in ("", "a", "fifteen letters"):
        (tmp_path / "secret").write_text(short)
        with pytest.raises(UsageError, match=f"holds {len(short)} characters"):
            secret(tmp_path)
        with monkeypatch.context() as environment:
            environment.setenv("DRAFTCORE_SECRET", short)
            with pytest.raises(UsageError, match="DRAFTCORE_SECRET holds"):
                secret(tmp_path)


def test_a_weight_that_two_wrap_units_share_is_named() -> None:
    """What sharded drafts train is seen by whole runs."""
    inner = nn.Linear(3, 3), nn.Linear(3, 3)
    inner[0].weight = inner[1].weight
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(*inner))

    def draft(*wrap_units: str) -> Draft:
        groups = [{"params": list(module.parameters())}]
        return Draft(module, {}, TrainingDefaults(1e-3, 0.0, 1.0), groups, wrap_units=wrap_units)

    require_shardable(draft("0", "1"))
    with pytest.raises(DraftcoreError, match=r"shared by the wrap units '1' and '1\.1'"):
        require_shardable(draft("1.1", "1"))
