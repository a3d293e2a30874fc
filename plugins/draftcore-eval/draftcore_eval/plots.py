"""Plots as PNG files; and that of metrics.jsonl, over steps."""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from draftcore.files import regular, write_atomic

Points = defaultdict[str, list[tuple[int, float]]]  # by metric: steps and values
SHARES = {"acceptance_rate": "acceptance by position", "accuracy": "accuracy"}  # their titles
NEAR = 0.02  # of a curve's points, to either side of one, that are averaged


def figure(panels: int = 1) -> tuple[Any, Sequence[Any]]:
    """Return a figure, and the axes of its panels, one above the other."""
    from matplotlib.figure import Figure  # 0.3 s; no pyplot, so no window system is touched

    drawn: Any = Figure(layout="constrained", figsize=(6.4, 2.4 + 2.4 * panels))
    return drawn, drawn.subplots(panels, sharex=True, squeeze=False)[:, 0]


def fit_shares(axes: Any, highest: float) -> None:
    """Let an axis of shares begin at 0 and end above the highest of them, however small."""
    axes.set_ylim(0, min(1.0, max(0.01, 1.25 * highest)))


def save(drawn: Any, file: Path) -> None:
    drawn.savefig(png := io.BytesIO(), format="png", dpi=144)
    write_atomic(file, png.getvalue())


# ---------------------------------------------------------------- metrics over steps


def plot_metrics(folder: Path) -> None:
    """Draw metrics.png from metrics.jsonl of a draft: its loss, and acceptance as its algorithm counts it.

    Nothing is drawn of a single step.
    """
    trained, held_out = read_metrics(folder / "metrics.jsonl")
    if len(trained["loss"]) < 2:
        return
    panels = panels_of({*trained, *held_out})
    drawn, all_axes = figure(len(panels))
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        highest = 0.0
        for number, (name, label) in enumerate(curves.items()):
            if points := trained[name]:
                steps, values = np.array(points, dtype=float).T
                axes.plot(steps, values, color=f"C{number}", alpha=0.25)
                axes.plot(steps, mean := smooth(values), color=f"C{number}", label=label)
                highest = max(highest, mean.max())
            if points := held_out[name]:
                steps, values = np.array(points, dtype=float).T
                said = "held out" if len(curves) == 1 or not number else None
                axes.plot(steps, values, "o--", color=f"C{number}", label=said, markersize=4)
                highest = max(highest, values.max())
        if title in SHARES.values():
            fit_shares(axes, highest)
        axes.set_ylabel(title)
        axes.legend(loc="upper right", fontsize="small")  # "best" takes seconds on a busy machine
    all_axes[0].set_title(f"{folder.resolve().name}, step {trained['loss'][-1][0]}")
    all_axes[-1].set_xlabel("step")
    save(drawn, folder / "metrics.png")


def read_metrics(file: Path) -> tuple[Points, Points]:
    """Return what metrics.jsonl has of training, and of held-out rows; nothing of a line half written."""
    trained, held_out = Points(list), Points(list)
    for text in regular(file).read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            line = json.loads(text)
            points = held_out if "evaluation" in line else trained
            for name, value in line.get("evaluation", line).items():
                if isinstance(value, int | float) and math.isfinite(value):
                    points[name].append((line["step"], value))
    return trained, held_out


def panels_of(names: set[str]) -> dict[str, dict[str, str]]:
    """Return by a panel's title the metrics that it shows, with their labels.

    Acceptance, or where that is not counted accuracy, is of each position or of all together.
    """
    panels = {"loss": {"loss": "training"}}
    kind = "acceptance_rate" if "acceptance_rate_0" in names else "accuracy"
    positions = range(sum(re.fullmatch(rf"{kind}_\d+", name) is not None for name in names))
    panels[SHARES[kind]] = {f"{kind}_{k}": f"position {k + 1}" for k in positions}
    panels[SHARES[kind]] |= {kind: "training"} if kind in names else {}
    if "acceptance_length" in names:
        panels["acceptance length"] = {"acceptance_length": "training"}
    return {title: curves for title, curves in panels.items() if curves}


def smooth(values: Any) -> Any:
    """Return each value's mean with those near it."""
    near, sums = int(NEAR * len(values)), np.insert(np.cumsum(values), 0, 0.0)
    places = np.arange(len(values))
    low, high = np.maximum(places - near, 0), np.minimum(places + near + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
