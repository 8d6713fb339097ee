"""Run a rank in a process that a backend started: start a trainkit worker, watch it, report its end to the backend."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment, socket_environ, workers
from trainkit.cluster.tasks import Identity, Task
from trainkit.files import open_regular
from trainkit.run.backends.attempt import RankError, stop_file, stop_reason
from trainkit.run.folder.fencing_token import VARIABLE as FENCE
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import ProcessEvidence, TimeLimits, Watch
from trainkit.run.process.error_report import read_error_report, write_error_report
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup, worker_environ
from trainkit.run.signals import EXIT_CODES, Reason, signal_of
from trainkit.run.supervisor.failure import hanging, root_cause

_CLEAN: Final = frozenset(EXIT_CODES.values())
_WORKER: Final = (sys.executable, "-m", "trainkit.run.worker_main")


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """The rank of a process that a backend started."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    """Ranks of this host."""

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are on this host."""
        return self.num_local == self.num_ranks


def worker_payload(
    folder: RunFolder,
    *,
    kind: str,
    store: tuple[str, int],
    environ: Mapping[str, str],
    cuda: bool,
    limits: TimeLimits,
    elastic: bool = False,
) -> dict[str, Any]:
    """Return the argument of `run_rank` for every rank, as plain values."""
    return {
        "folder": str(folder.path.absolute()),
        "cwd": str(Path.cwd()),
        "kind": kind,
        "store": list(store),
        "environ": dict(environ),
        "device": "cuda:0" if cuda else "cpu",
        "limits": asdict(limits),
        "elastic": elastic,
    }


def run_rank(payload: Mapping[str, Any], info: WorkerInfo, attempt: list[str] | None) -> None:
    """Run one rank until it ends, in a process that dies with this one.

    Raises:
        RankError: the rank failed; the error report is in the folder.
        ConfigError: this host does not see the run folder.
    """
    if attempt is None:
        return
    number, token = attempt
    folder = RunFolder(Path(payload["folder"]))
    FencingToken.verify(folder, token)
    exits: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
    with WorkerGroup(int(number), exits.put) as group:
        evidence = ProcessEvidence(folder, lambda: group.marks)
        command = [*_WORKER, str(folder.resolved)]
        environ = {**_environ(payload, info, attempt), FENCE: token}
        cwd = Path(payload["cwd"])  # relative paths of the config start there, if it exists on this host
        group.start(info.rank, command, environ, folder.log_of(info.rank), cwd=cwd if cwd.is_dir() else None)
        code = _watch(group, exits, folder, info, TimeLimits.of(payload["limits"]), evidence=evidence)
    if code not in _CLEAN or (code == 0 and not folder.done_of(info.rank).exists()):
        raise RankError(_failure_headline(folder, info, code, evidence))


def _environ(payload: Mapping[str, Any], info: WorkerInfo, attempt: list[str]) -> dict[str, str]:
    host, port = payload["store"]
    launch = LaunchEnvironment(
        kind=payload["kind"],
        tasks=workers(info.num_ranks),
        rank=info.rank,
        local_rank=info.local_rank,
        num_local=info.num_local,
        num_hosts=1 if info.is_alone else info.num_ranks,
        store=(host, int(port)),
    )
    identity = Identity(
        task=Task(role="worker", index=info.rank, rank=info.rank, device=payload["device"]),
        num_ranks=info.num_ranks,
        store=launch.store,
        prefix="/".join(("attempt", *attempt)),
        attempt=int(attempt[0]),
    )
    return worker_environ({**socket_environ(launch), **os.environ, **payload["environ"]}, identity)


def _watch(
    group: WorkerGroup,
    exits: queue.SimpleQueue[ProcessExit],
    folder: RunFolder,
    info: WorkerInfo,
    limits: TimeLimits,
    *,
    evidence: ProcessEvidence,
) -> int:
    """Wait for the worker to end; forward a request to stop once."""
    watch, stop_sent = Watch(limits, folder, sees_all=info.is_alone, pid_of=evidence.pid), False
    seen = range(info.num_ranks) if info.is_alone else [info.rank]  # a host does not see the heartbeats of another
    while True:
        try:
            return exits.get(timeout=watch.interval_s).code
        except queue.Empty:
            pass
        if not stop_sent and stop_file(folder).exists():
            stop_sent = True
            group.signal(signal_of(_reason_of_stop(folder)))
        overdue = watch.look(seen)
        if overdue is not None and overdue.rank == info.rank:  # every rank is ended by its own watch
            failure = hanging(folder, overdue, [info.rank], evidence)
            with open_regular(folder.log_of(info.rank), "ab") as log:
                log.write(f"{group.stacks(info.rank, folder.stacks_of(info.rank))}\n".encode())
            write_error_report(folder.error_of(info.rank), info.rank, RankError(failure.headline))
            group.kill()


def _reason_of_stop(folder: RunFolder) -> Reason:
    reason = stop_reason(folder)
    return "stopped" if reason == "stopped" else "hangup" if reason == "hangup" else "preempted"


def _failure_headline(folder: RunFolder, info: WorkerInfo, code: int, evidence: ProcessEvidence) -> str:
    """Return the cause of the rank's failure; write an error report for a rank that left none."""
    exited = ProcessExit(attempt=0, rank=info.rank, code=code)
    headline = root_cause(folder, [exited], [], evidence).headline
    if read_error_report(folder.error_of(info.rank)) is None:
        write_error_report(folder.error_of(info.rank), info.rank, RankError(headline))
    return headline
