"""What the tests of both captures share: a run's folder, and features beside transformers' own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from draftcore_sdk.captures import Reference
from draftcore_sdk.targets import conversations
from torch import Tensor

SAMPLES, BATCH, EPOCHS = 24, 4, 2


def require_features(
    features: Mapping[str, Tensor], tokens: Sequence[int], reference: Reference
) -> None:
    """Compare with transformers: in fp32, 5.4e-7 of the largest number was the largest difference."""
    for name, expected_TH in reference.features(tokens).items():
        gap = (features[name] - expected_TH).abs().max() / expected_TH.abs().max()
        assert gap < 1e-5, (name, float(gap))


def write_run(folder: Path, target: Path, **changes: Any) -> Path:
    """Write the YAML of a run; `changes` are to its keys, those of `train` beside the ones here."""
    folder.mkdir()
    train = {"batch": BATCH, "epochs": EPOCHS, "lr": 0.003, "log_every": 1, "device": "cpu"}
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": str(conversations(folder / "train.jsonl", SAMPLES)),
            "eval": str(conversations(folder / "eval.jsonl", ["yes it is", "abcabcabc", "no"])),
        },
        "algorithm": {"name": "eagle3", "options": {"layers": [0, 1, 2], "ttt_length": 2}},
        "eval": {"max_new_tokens": 8},
        **changes,
        "train": {**train, **changes.get("train", {})},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def losses(file: Path) -> list[float]:
    """The loss of each step of a run."""
    lines = map(json.loads, (file.parent / "run" / "metrics.jsonl").read_text().splitlines())
    found = [line["loss"] for line in lines if "loss" in line]
    assert len(found) == EPOCHS * SAMPLES // BATCH
    return found
