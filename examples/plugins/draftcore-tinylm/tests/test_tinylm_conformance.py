"""The distribution, its plugin, its target and its rows pass what every one of them must pass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.samples import SamplesSuite
from draftcore_sdk.targets import TargetSuite
from draftcore_tinylm.model import TinyConfig, TinyLM, save


class TestPlugin(PluginSuite):
    plugin = "draftcore_tinylm.plugin"


class TestTarget(TargetSuite):
    plugin = "draftcore_tinylm.plugin"

    def target_options(self, folder: Path, seed: int) -> Mapping[str, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            save(TinyLM(TinyConfig(vocab_size=100)), folder)
        return {"path": str(folder), "device": "cpu"}


class TestSamples(SamplesSuite):
    plugin = "draftcore_tinylm.plugin"

    def data_options(self, folder: Path, seed: int) -> Mapping[str, Any]:
        rows = [{"input_ids": [7, seed, 9, row], "loss_mask": [0, 0, 1, 1]} for row in range(5)]
        lines = [f"{json.dumps(row)}\n" for row in rows]
        for part in ("train", "eval"):
            (folder / part).write_text("".join(lines))
        return {part: str(folder / part) for part in ("train", "eval")}
