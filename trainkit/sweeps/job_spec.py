"""A job that a file describes and any backend can run. Only the path of this file is pickled.

.jobs/NUMBER.json     command, environment, folder, the process that waits for it
.jobs/NUMBER.asked    signals requested for it, one per line: SIGINT, SIGTERM, SIGKILL
"""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.host import ProcessId, host_id
from trainkit.files import Kind, read_lines, read_map
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.sweeps.job_sources import continued

_POLL_S: Final = 0.2
_KEYS: Final[Mapping[str, Kind]] = {"command": list, "environ": dict, "cwd": str, "log": str, "waiting": list}
_RUNNING: Final[list[WorkerGroup]] = []
"""The running job of this process, for signal handlers."""


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
    waiting: tuple[int, int, int]
    """Host, process id and start time of the process that waits for the job; on the same host, the job ends with it."""

    def write(self, path: Path) -> None:
        """Write the description, readable only by this user."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def this_process() -> tuple[int, int, int]:
    """Return host, process id and start time of this process: process ids are reused."""
    return host_id(), os.getpid(), ProcessId.of(os.getpid()).started


def signals_file(path: Path) -> Path:
    """Return the file with the signals requested for a job."""
    return path.with_suffix(".asked")


def run_described(path: str) -> int:
    """Run the job of a file to its end, and forward the requested signals to it; return its exit code."""
    spec = JobSpec(**read_map(Path(path), _KEYS))
    signals, num_read, exits = signals_file(Path(path)), 0, queue.SimpleQueue[ProcessExit]()
    log, (host, pid, started) = Path(spec.cwd) / spec.log, spec.waiting
    command, _ = continued(spec.command, log.parent)  # a job that was preempted is run once more
    with WorkerGroup(0, exits.put) as group:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.environ}
        group.start(0, command, environ, log, cwd=Path(spec.cwd))
        _RUNNING.append(group)
        try:
            while True:
                with suppress(queue.Empty):
                    return exits.get(timeout=_POLL_S).code
                if host == host_id() and not ProcessId(pid, started).lives:
                    group.kill()
                lines = list(read_lines(signals)) if signals.exists() else []
                for name in [line.decode(errors="replace").strip() for line in lines[num_read:]]:
                    if name == "SIGKILL":
                        group.kill()
                    else:
                        group.signal(signal.Signals[name])
                num_read = len(lines)
        finally:
            _RUNNING.remove(group)


def _requeued(path: str) -> Any:
    """Resubmit a job that is preempted or out of time, called by submitit: the run saves and continues in a later job.

    Source: https://github.com/facebookincubator/submitit/blob/main/docs/checkpointing.md
    """
    from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - submitit called this

    for group in _RUNNING:
        group.signal(signal.SIGTERM)
    for group in _RUNNING:
        while group.running:
            signal.sigtimedwait([], _POLL_S)
    return DelayedSubmission(run_described, path)


run_described.checkpoint = _requeued  # type: ignore[attr-defined]  # submitit looks for this attribute
