"""The observer `tensorboard`: event files in the run's folder, a folder for each draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftcore_trackers.tracker import Tracker


class TensorBoard(Tracker):
    name = module = "tensorboard"

    def open(self, run: Path, run_id: str, config: Mapping[str, Any]) -> None:
        self.folder, self.writers = run / "tensorboard", dict[str, Any]()
        text = f"```json\n{json.dumps(config, indent=1, default=str)}\n```"
        for draft, last in self.steps.items():
            self.writer(draft).add_text("config", text, last)

    def writer(self, draft: str) -> Any:
        """Return a draft's writer. Readers leave out what an earlier start wrote of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        if draft not in self.writers:
            last = self.steps.get(draft)
            purge = last + 1 if last else None
            self.writers[draft] = SummaryWriter(self.folder / draft, purge_step=purge)
        return self.writers[draft]

    def log(self, step: int, figures: Mapping[str, float], draft: str) -> None:
        for name, value in figures.items():
            self.writer(draft).add_scalar(name, value, step)

    def picture(self, file: Path, draft: str) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(file).convert("RGB"))
        self.writer(draft).add_image("curves", pixels, self.step, dataformats="HWC")

    def close(self, reason: str) -> None:
        for writer in self.writers.values():
            writer.close()


plugin = TensorBoard()
