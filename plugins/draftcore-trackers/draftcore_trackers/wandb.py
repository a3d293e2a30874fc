"""The observer `wandb`: Weights & Biases, online or offline as WANDB_MODE says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftcore_trackers.tracker import PROJECT, RunTracker


class WeightsAndBiases(RunTracker):
    name = module = "wandb"

    def open(self, run: Path, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        online = wandb.setup().settings.mode in ("online", "shared")
        if online and not wandb.login(prompt=False):  # it would ask for one, and wait
            raise RuntimeError("there is no API key: call `wandb login`, or set WANDB_MODE=offline")
        self.picture_of = wandb.Image
        self.tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run_id,
            resume="allow",
            reinit="create_new",  # and leave alone what else this process tracks
            config={**config},
            allow_val_change=True,
            settings=wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off")),
        )
        self.known = self.tracked.step - 1

    def close(self, reason: str) -> None:
        self.tracked.finish(exit_code=1 if reason == "failed" else 0)


plugin = WeightsAndBiases()
