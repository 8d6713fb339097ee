"""One turn of a measurement: a short training in a process of its own, as a run is started."""

from __future__ import annotations

import os
import signal
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
from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import AbsentFileError
from trainkit.files import read_map
from trainkit.run.begin import write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.sweeps.results.metric_stream import last_line

_MEASUREMENT: Final = "trainkit.callbacks.Measurement"
ERROR_FILE: Final = "error.json"
"""File with the error that ended a turn, next to its run folder: `error`, its class, and `line`, its first line."""
_KEYS: Final[Mapping[str, Kind]] = {
    "steps": int, "samples": int, "seconds": float, "targets": float, "ranks": list, "peak_bytes": int,
    "began_at": float, "first_step_s": float, "compile_s": float, "step_spread": float, "replicas": int, "device": str,
    "trained_s": float, "trained_steps": int,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """The result of an evaluation that ends a training."""

    metric: str
    """The name of the metric."""
    value: float
    """The value that ends a training."""
    mode: str
    """Whether higher or lower values are better: max or min."""

    @classmethod
    def of(cls, metric: str, value: float, cfg: RunConfig) -> Target:
        """Return the target with the direction that the config gives to the metric."""
        return cls(metric=metric, value=value, mode=MonitoredMetric.of(replace(cfg.eval, metric=metric)).mode)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurement of one turn, or the reason why it failed."""

    figures: Mapping[str, Any]
    """The content of `measured.json` (`trainkit.callbacks.measurement`); empty for a turn that failed."""
    start_s: float = 0.0
    """Seconds from the start of the process to the first step."""
    failure: str = ""
    error: str = ""
    """The class of the error that has ended it, or `SIGKILL`; empty if it ended in another way."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training that has run in processes of its own, and has ended."""

    folder: Path
    """The run folder; any of its files may be missing."""
    failure: str = ""
    """Reason why it failed, in one line; empty if it did not."""
    error: str = ""
    """The class of trainkit's error that has ended it, or `SIGKILL`; empty for anything else."""


def measured_config(cfg: RunConfig, *, warmup_steps: int, num_steps: int) -> RunConfig:
    """Return the config of a turn: a warm-up and the measured steps.

    Evaluation, callbacks, loggers and checkpoints are left out; the rest is the training of the config.
    """
    node = {"_target_": _MEASUREMENT, "warmup_steps": warmup_steps, "num_steps": num_steps}
    return replace(
        alone(cfg, {"measurement": node}),
        stop_at_step=warmup_steps + num_steps,
        eval=replace(cfg.eval, every_steps=None, every_epochs=None, beside=False),
    )


def config_until(cfg: RunConfig, target: Target) -> RunConfig:
    """Return the config of a turn that trains until an evaluation has a result, or to its end."""
    ends = {"until": target.metric, "target": target.value, "mode": target.mode}
    node = {"_target_": _MEASUREMENT, "warmup_steps": 1, **ends}
    return replace(alone(cfg, {"measurement": node}), eval=replace(cfg.eval, beside=False))


def alone(cfg: RunConfig, callbacks: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return a config that prints and writes nothing, restarts nothing, and has only these callbacks."""
    return replace(
        cfg,
        resume=None,
        quiet=True,
        callbacks={name: dict(node) for name, node in callbacks.items()},
        logger={},
        checkpoint=replace(cfg.checkpoint, every_steps=None, every_epochs=None, every_s=None, export=False),
        supervisor=replace(cfg.supervisor, max_restarts=0),
        elastic=replace(cfg.elastic, min_replicas=None),
    )


def run_turn(cfg: RunConfig, folder: Path, *, threads: int | None = None) -> Turn:
    """Train a config in a new process, and return the measurement after the process has ended.

    Args:
        cfg: result of `measured_config` or `config_until`.
        folder: a new folder for the files of the turn.
        threads: CPU threads of each process; None: those of torch.
    """
    started = time.time()
    ended = train_apart(cfg, folder, threads=threads)
    if ended.failure:
        return Turn(figures={}, failure=ended.failure, error=ended.error)
    return finished_turn(ended.folder, started)


def train_apart(cfg: RunConfig, folder: Path, *, threads: int | None = None) -> Ended:
    """Train a config in a new process; return after this process and its children have ended.

    Args:
        cfg: a checked config.
        folder: a new folder for the files of the training.
        threads: CPU threads of each process; None: those of torch.
    """
    given = RunFolder(folder / "given")
    given.path.mkdir(parents=True)
    write_resolved(given, cfg)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **package_environ(), **config_dir_environ()}
    environ |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    ended: SimpleQueue[ProcessExit] = SimpleQueue()
    command = (sys.executable, "-m", "trainkit.measuring.turn_main", str(given.resolved), str(folder / "run"))
    log = folder / "output.log"
    with WorkerGroup(0, ended.put) as group:
        group.start(0, command, environ, log)
        code = ended.get().code
    if code == 0:
        return Ended(folder=folder / "run")
    error, line = _reported(folder / ERROR_FILE) or ("SIGKILL" if code == -signal.SIGKILL else "", last_line(log))
    ending = f"exit {code}" if code >= 0 else f"signal {-code}"
    return Ended(folder=folder / "run", failure=": ".join(part for part in (ending, line) if part), error=error)


def _reported(path: Path) -> tuple[str, str] | None:
    """Return the class and the message line of the error that a turn has reported; None without an error."""
    try:
        found = read_map(path, {"error": str, "line": str})
    except AbsentFileError:
        return None
    return found["error"], f"{found['error']}: {found['line']}"


def finished_turn(run: Path, started: float) -> Turn:
    """Return the measurement of a training that has ended.

    Args:
        run: the run folder.
        started: time of its start, as `time.time`.
    """
    try:
        found = read_map(run / FILE, _KEYS)
    except AbsentFileError:
        return Turn(figures={}, failure="the training ended before its first measured step")
    return Turn(figures=found, start_s=max(found["began_at"] - started, 0.0))
