"""Send a run to MLflow: to the store of `MLFLOW_TRACKING_URI`, or to `mlflow.db` in the current folder.

Source: MLflow Python reference, `MlflowClient`; limits of names and batches in its REST reference.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import MlflowClient

from trainkit.tracking.service import LoggedRow, TrackedRun

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
_ID: Final = "trainkit.id"
_FOREIGN: Final = re.compile(r"[^\w\-. /:]")
"""Characters that a name must not contain."""
_LONGEST: Final = 250
_PARAMS, _METRICS = 100, 1000
"""Largest numbers of parameters and metrics per request."""


class _Mlflow:
    holds_last = False

    def __init__(self) -> None:
        self._client = MlflowClient()
        self._id = ""

    def open(self, run: TrackedRun) -> None:
        client = self._client
        found = client.get_experiment_by_name(run.project)
        experiment = client.create_experiment(run.project) if found is None else found.experiment_id
        same = client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if same:
            self._id, known = same[0].info.run_id, same[0].data.params
            client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            tags = {_ID: run.id, "trainkit.fingerprint": run.fingerprint}
            self._id, known = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id, {}
        params = ((_plain(key), str(value)[:6000]) for key, value in run.parameters.items())
        new = iter([Param(key, value) for key, value in params if key not in known])  # a parameter is never changed
        while batch := list(islice(new, _PARAMS)):
            client.log_batch(self._id, params=batch)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        now = int(time.time() * 1000)
        points = iter(
            [Metric(_plain(name), value, now, row.step) for row in rows for name, value in row.values.items()]
        )
        while batch := list(islice(points, _METRICS)):
            self._client.log_batch(self._id, metrics=batch)

    def add_file(self, path: Path, name: str) -> None:
        folder = name.rpartition("/")[0]
        self._client.log_artifact(self._id, str(path), folder or None)

    def close(self, *, has_finished: bool, status: str) -> None:
        self._client.set_tag(self._id, "trainkit.status", status)
        ended = RunStatus.FINISHED if has_finished else RunStatus.FAILED if status == "failed" else RunStatus.KILLED
        self._client.set_terminated(self._id, RunStatus.to_string(ended))


def _plain(name: str) -> str:
    return _FOREIGN.sub("_", name)[:_LONGEST]


def make() -> _Mlflow:
    """Return the service."""
    return _Mlflow()
