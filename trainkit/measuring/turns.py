"""One turn of a measurement: a short training in a process of its own, as a run is started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from trainkit.bounded import Kind
from trainkit.callbacks.measurement import FILE
from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.config.secrets import to_environment
from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import AbsentFileError
from trainkit.reading import read_map
from trainkit.run.begin import write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.sweeps.results.metric_stream import last_line

_MEASUREMENT: Final = "trainkit.callbacks.measurement.Measurement"
_KEYS: Final[Mapping[str, Kind]] = {
    "steps": int, "samples": int, "seconds": float, "targets": float, "ranks": list, "peak_bytes": int,
    "began_at": float, "first_step_s": float, "compile_s": float, "step_spread": float, "replicas": int, "device": str,
    "trained_s": float, "trained_steps": int,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """The result of an evaluation that ends a training."""

    metric: str
    value: float
    mode: str
    """Whether higher or lower values are better: max or min."""

    @classmethod
    def of(cls, metric: str, value: float, cfg: RunConfig) -> Target:
        """Return the target with the direction that the config gives to the metric."""
        return cls(metric=metric, value=value, mode=MonitoredMetric.of(replace(cfg.eval, metric=metric)).mode)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn measured, or why it failed."""

    figures: Mapping[str, Any]
    """The content of `measured.json` (`trainkit.callbacks.measurement`); empty for a turn that failed."""
    start_s: float = 0.0
    """Seconds from the start of the process to the first step."""
    failure: str = ""


def measured_config(cfg: RunConfig, *, warmup_steps: int, num_steps: int) -> RunConfig:
    """Return the config of a turn: a warm-up and the measured steps.

    Evaluation, callbacks, loggers and checkpoints are left out; the rest is the training of the config.
    """
    node = {"_target_": _MEASUREMENT, "warmup_steps": warmup_steps, "num_steps": num_steps}
    return replace(
        _alone(cfg, node),
        stop_at_step=warmup_steps + num_steps,
        eval=replace(cfg.eval, every_steps=None, every_epochs=None, beside=False),
    )


def config_until(cfg: RunConfig, target: Target) -> RunConfig:
    """Return the config of a turn that trains until an evaluation has a result, or to its end."""
    ends = {"until": target.metric, "target": target.value, "mode": target.mode}
    node = {"_target_": _MEASUREMENT, "warmup_steps": 1, **ends}
    return replace(_alone(cfg, node), eval=replace(cfg.eval, beside=False))


def _alone(cfg: RunConfig, node: Mapping[str, Any]) -> RunConfig:
    return replace(
        cfg,
        resume=None,
        quiet=True,
        callbacks={"measurement": dict(node)},
        logger={},
        checkpoint=replace(cfg.checkpoint, every_steps=None, every_epochs=None, every_s=None, export=False),
        supervisor=replace(cfg.supervisor, max_restarts=0),
        elastic=replace(cfg.elastic, min_replicas=None),
    )


def run_turn(cfg: RunConfig, folder: Path) -> Turn:
    """Train a config in a new process, and return what it measured; the process has ended by then.

    Args:
        cfg: from `measured_config` or `config_until`.
        folder: a new folder for the files of the turn.
    """
    given = RunFolder(folder / "given")
    given.path.mkdir(parents=True)
    secrets = write_resolved(given, cfg)
    environ = {
        **os.environ, "PYTHONUNBUFFERED": "1", **package_environ(), **config_dir_environ(), **to_environment(secrets),
    }  # fmt: skip
    ended: SimpleQueue[ProcessExit] = SimpleQueue()
    command = (sys.executable, "-m", "trainkit.measuring.turn_main", str(given.resolved), str(folder / "run"))
    started = time.time()
    log = folder / "output.log"
    with WorkerGroup(0, ended.put) as group:
        group.start(0, command, environ, log)
        code = ended.get().code
    if code == 0:
        return finished_turn(folder / "run", started)
    ending = f"exit {code}" if code >= 0 else f"signal {-code}"
    return Turn(figures={}, failure=": ".join(part for part in (ending, last_line(log)) if part))


def finished_turn(run: Path, started: float) -> Turn:
    """Return what a training has measured that has ended.

    Args:
        run: its run folder.
        started: when it was started, as `time.time`.
    """
    try:
        found = read_map(run / FILE, _KEYS)
    except AbsentFileError:
        return Turn(figures={}, failure="the training ended before its first measured step")
    return Turn(figures=found, start_s=max(found["began_at"] - started, 0.0))
