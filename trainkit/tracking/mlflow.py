"""Define the logger for MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainkit.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Mlflow(Tracker):
    """Sends a run to MLflow: to the store of `MLFLOW_TRACKING_URI`, or to `mlflow.db` in the current folder.

    `project` is the experiment. To view it: mlflow ui
    """

    tracker: ClassVar[str] = "mlflow"
