"""A job that a file describes and any backend can run. Only the path of this file is pickled.

.jobs/NUMBER.json     command, environment, folder, the process that waits for it
.jobs/NUMBER.asked    signals requested for it, one per line: SIGINT, SIGTERM, SIGKILL
.jobs/NUMBER.ended    its exit code
"""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.host import Machine, ProcessId
from trainkit.files import read_lines, read_map, write_atomically
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.trainer.ownership import discard_lock

_POLL_S: Final = 0.2
_BEGUN: Final = "resolved.yaml"
_NOW: Final[list[WorkerGroup]] = []
"""The running job of this process, for signal handlers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The process that waits for the jobs; jobs on its host end with it."""

    host: str
    pid: int
    started: int
    """Ticks after boot at which it started, because process ids are reused."""

    @classmethod
    def here(cls) -> Driver:
        """Return the calling process as driver."""
        return cls(host=_host(), pid=os.getpid(), started=ProcessId.of(os.getpid()).started)

    @property
    def is_gone(self) -> bool:
        """Whether the process has exited; always False for a process of another host."""
        return _host() == self.host and not ProcessId(self.pid, self.started).lives


@cache
def _host() -> str:
    """Return an id of the process table: machines, and containers on them, may share a host name."""
    machine = Machine.here()
    return " ".join(filter(None, (machine.host, machine.boot_id, machine.processes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The description of a job in its file."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    """Environment variables in addition to the environment of the backend's process."""
    cwd: str
    """The folder in which the sweep was started; relative paths begin there."""
    log: str
    """The file for its output, in its run folder."""
    driver: Driver

    def write(self, path: Path) -> None:
        """Write the description, readable only by this user."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        """Read the description of a job."""
        spec = read_map(path, {"command": list, "environ": dict, "cwd": str, "log": str, "driver": dict})
        return cls(**{**spec, "command": tuple(spec["command"]), "driver": Driver(**spec["driver"])})

    @property
    def line(self) -> Sequence[str]:
        """The command; for a run that has already begun, the command that resumes it."""
        begun = (Path(self.cwd) / self.log).with_name(_BEGUN).is_file()
        resumes = any(word.startswith("resume=") for word in self.command)
        return (*self.command, "resume=auto") if begun and not resumes else self.command


def signals_file(path: Path) -> Path:
    """Return the file with the signals requested for a job."""
    return path.with_suffix(".asked")


def exit_code_file(path: Path) -> Path:
    """Return the file with the exit code of a job."""
    return path.with_suffix(".ended")


def run_described(path: str) -> int:
    """Run the job of a file to its end; return its exit code."""
    place = Path(path)
    spec = JobSpec.read(place)
    exits: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
    log = Path(spec.cwd) / spec.log
    if not log.with_name(_BEGUN).is_file():  # left by a run that was killed before it began
        discard_lock(log.with_name(".lock"))
    with WorkerGroup(0, exits.put) as group:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environ}
        group.start(0, spec.line, environ, log, cwd=Path(spec.cwd))
        _NOW.append(group)
        try:
            code = _wait_and_forward(group, exits, signals_file(place), spec.driver)
        finally:
            _NOW.remove(group)
    if os.environ.get("SLURM_PROCID", "0") == "0":  # one task of a job reports for all
        write_atomically(exit_code_file(place), str(code))
    return code


def _wait_and_forward(group: WorkerGroup, exits: queue.SimpleQueue[ProcessExit], signals: Path, driver: Driver) -> int:
    """Wait for the end of a job, and forward the requested signals."""
    seen = 0
    while True:
        try:
            return exits.get(timeout=_POLL_S).code
        except queue.Empty:
            pass
        if driver.is_gone:
            group.kill()
        names = [line.decode(errors="replace").strip() for line in read_lines(signals)] if signals.exists() else []
        for name in names[seen:]:
            if name == "SIGKILL":
                group.kill()
            else:
                group.signal(signal.Signals[name])
        seen = len(names)


def _requeued(path: str) -> Any:
    """Resubmit a job that is preempted or out of time, called by submitit: the run saves and continues in a later job.

    Source: https://github.com/facebookincubator/submitit/blob/main/docs/checkpointing.md
    """
    from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - submitit called this

    for group in _NOW:
        group.signal(signal.SIGTERM)
    for group in _NOW:
        while group.running:
            signal.sigtimedwait([], _POLL_S)
    return DelayedSubmission(run_described, path)


run_described.checkpoint = _requeued  # type: ignore[attr-defined]  # submitit looks for this attribute
