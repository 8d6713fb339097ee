"""The trackers that a run can be sent to: a table of services with one interface.

Each imports its package in the thread that sends; none imports torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

LoggedRow = tuple[int, Mapping[str, float]]
"""Number of updates done, and finite numbers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One run in a tracker."""

    folder: Path
    """The run folder."""
    id: str
    """32 hexadecimal digits, the same after a resume."""
    project: str
    """Project or experiment of the run."""
    mode: str
    """`online`, or `offline` if the tracker can write for a later upload."""
    name: str
    """Displayed name: that of the run and of its folder."""
    fingerprint: str
    """Hash of the keys that decide the result."""
    parameters: Mapping[str, str | float | bool]
    """Full key -> value, without secrets; lists as JSON."""


class Service(Protocol):
    """A tracker. Every method may raise any error, and may take any time: the training does not wait for it."""

    holds_last: bool
    """Whether the rows of the last step are kept back until those of another step, or the end, follow."""

    def open(self, run: TrackedRun) -> None:
        """Create the tracked run, or continue the one with this id."""

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Send rows, in the order of their steps."""

    def add_file(self, path: Path, name: str) -> None:
        """Send a file of the run folder under its relative name."""

    def close(self, *, has_finished: bool, status: str) -> None:
        """Send the rest, and end the tracked run; `status` as in `result.json`, or `killed`."""


class _Mlflow:
    """Sends to the store of `MLFLOW_TRACKING_URI`, or to `mlflow.db` in the current folder.

    Source: MLflow Python reference, `MlflowClient`; limits of names and batches in its REST reference.
    """

    holds_last = False

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else it logs that it creates tables
        from mlflow import entities  # noqa: PLC0415 - an extra
        from mlflow.tracking import MlflowClient  # noqa: PLC0415 - the same

        self._client: Any = MlflowClient()
        self._kinds: Any = entities
        self._id = ""

    def open(self, run: TrackedRun) -> None:
        client, mark = self._client, "trainkit.id"
        existing = client.get_experiment_by_name(run.project)
        experiment = client.create_experiment(run.project) if existing is None else existing.experiment_id
        same = client.search_runs([experiment], f"tags.`{mark}` = '{run.id}'", max_results=1)
        if same:
            self._id, logged = same[0].info.run_id, same[0].data.params
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {mark: run.id, "trainkit.fingerprint": run.fingerprint}
            self._id, logged = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id, {}
        params = ((_plain(key), str(value)[:6000]) for key, value in run.parameters.items())
        new = (self._kinds.Param(key, value) for key, value in params if key not in logged)  # none is ever changed
        self._send(new, 100, lambda batch: client.log_batch(self._id, params=batch))

    def log(self, rows: Sequence[LoggedRow]) -> None:
        now, kind = int(time.time() * 1000), self._kinds.Metric
        points = (kind(_plain(name), value, now, step) for step, values in rows for name, value in values.items())
        self._send(points, 1000, lambda batch: self._client.log_batch(self._id, metrics=batch))

    @staticmethod
    def _send(items: Iterator[Any], most: int, send: Callable[[list[Any]], object]) -> None:
        """Send items in requests of at most `most`."""
        while batch := list(islice(items, most)):
            send(batch)

    def add_file(self, path: Path, name: str) -> None:
        self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)

    def close(self, *, has_finished: bool, status: str) -> None:
        self._client.set_tag(self._id, "trainkit.status", status)
        ended = "FINISHED" if has_finished else "FAILED" if status == "failed" else "KILLED"
        self._client.set_terminated(self._id, ended)


def _plain(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]


class _Runs:
    """The common part of services whose object for a run takes one row a call."""

    _run: Any
    _step: int | None = None

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)
            self._step = step


class _Trackio(_Runs):
    """Sends to Trackio's local folder (`TRACKIO_DIR`), or to the server or Space that its variables name.

    Source: Trackio Python reference, `trackio.init` and `Run`.
    """

    holds_last = False

    def open(self, run: TrackedRun) -> None:
        import trackio  # noqa: PLC0415 - an extra

        self._name = f"{run.name}-{run.id[:8]}"  # Trackio continues a run by its name
        self._run = trackio.init(
            project=run.project,
            name=self._name,
            group=f"fingerprint {run.fingerprint[:16]}",
            config={**run.parameters, "trainkit/id": run.id, "trainkit/fingerprint": run.fingerprint},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # it would monitor the sending process
            auto_log_cpu=False,
        )

    def add_file(self, path: Path, name: str) -> None:
        self._run.log_artifact(path, name=re.sub(r"[^A-Za-z0-9._-]", "-", f"{self._name}-{name}"), type="file")

    def close(self, *, has_finished: bool, status: str) -> None:
        self._run.log({"trainkit/status": status}, step=self._step)  # Trackio has no status of runs
        self._run.finish()


class _Wandb(_Runs):
    """Sends to Weights & Biases; with `mode=offline` into `RUN/tracking/wandb`, for `wandb sync`.

    Source: W&B Python reference, `wandb.init` (id, resume, mode) and `wandb.Settings`.
    """

    holds_last = True

    def open(self, run: TrackedRun) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            dir=run.folder / "tracking",
            mode="offline" if run.mode == "offline" else "online",
            resume="allow",
            tags=[f"fingerprint:{run.fingerprint[:16]}"],
            config={**run.parameters, "trainkit/fingerprint": run.fingerprint},
            allow_val_change=True,
            # Disable its own collection, which would record the sending process: its command, its output, its load.
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, disable_code=True, x_disable_stats=True,
                x_disable_meta=True, x_save_requirements=False, x_transaction_log_flush_interval=0.5,
            ),
        )  # fmt: skip

    def add_file(self, path: Path, name: str) -> None:
        self._run.save(str(path), base_path=str(path)[: -len(name)], policy="now")

    def close(self, *, has_finished: bool, status: str) -> None:
        self._run.summary["trainkit/status"] = status
        self._run.finish(exit_code=0 if has_finished else 1)


SERVICES: Final[Mapping[str, Callable[[], Service]]] = {"mlflow": _Mlflow, "trackio": _Trackio, "wandb": _Wandb}
"""Tracker -> what makes its service."""
