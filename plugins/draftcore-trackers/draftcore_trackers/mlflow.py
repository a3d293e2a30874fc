"""The observer `mlflow`: a run of an experiment, at the server or store of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftcore_trackers.tracker import PROJECT, Tracker, labelled

TAG = "draftcore_run"  # by which a run is found again
STATUS = {"interrupted": "KILLED", "failed": "FAILED"}
MOST, LONGEST = 100, 500  # parameters in a request, and characters of one's value


class MLflow(Tracker):
    name = module = "mlflow"

    def open(self, run: Path, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        for tracked in client.search_runs([experiment], f"tags.{TAG} = '{run_id}'"):
            self.id = tracked.info.run_id
            client.update_run(self.id, status="RUNNING")
            histories = (client.get_metric_history(self.id, key) for key in tracked.data.metrics)
            self.known = max((point.step for points in histories for point in points), default=-1)
            break
        else:
            self.id = client.create_run(
                experiment, tags={TAG: run_id}, run_name=run.name
            ).info.run_id
            params = [Param(key, str(value)[:LONGEST]) for key, value in flat(config)]
            for start in range(0, len(params), MOST):
                client.log_batch(self.id, params=params[start : start + MOST])
        client.log_dict(self.id, {**config}, "config.json")

    def log(self, step: int, figures: Mapping[str, float], draft: str) -> None:
        from mlflow.entities import Metric

        if step > self.known:
            now, named = int(1e3 * time.time()), labelled(figures, draft).items()
            self.client.log_batch(self.id, [Metric(key, value, now, step) for key, value in named])

    def picture(self, file: Path, draft: str) -> None:
        self.client.log_artifact(self.id, str(file), draft or None)

    def close(self, reason: str) -> None:
        self.client.set_terminated(self.id, STATUS.get(reason, "FINISHED"))


def flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections by their dotted keys."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


plugin = MLflow()
