"""A rank of a run in a process that an engine started: our worker, watched, its end reported to the engine."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Task
from trainkit.reading import open_regular
from trainkit.run.backends.attempt import RankError, stop_file, stop_reason
from trainkit.run.folder.fencing_token import VARIABLE as FENCE
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.metadata import worker_environ
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection.limits import TimeLimits
from trainkit.run.hang_detection.process_evidence import ProcessEvidence
from trainkit.run.hang_detection.stacks import stacks_of
from trainkit.run.hang_detection.watch import Watch
from trainkit.run.process.error_report import read_error_report, write_error_report
from trainkit.run.process.signals import EXIT_CODES, Reason, signal_of
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.rendezvous.network import socket_environ
from trainkit.run.supervisor.failure import hanging, root_cause

__all__ = ["WorkerInfo", "run_rank", "worker_payload"]

_CLEAN: Final = frozenset(EXIT_CODES.values())
_WORKER: Final = (sys.executable, "-m", "trainkit.run.worker_main")


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What the engine says of a process it started."""

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
    """What every rank is handed, as plain values.

    Args:
        folder: the run folder.
        kind: the engine's name.
        store: where the ranks meet.
        environ: variables for the worker, on top of those of the engine's process.
        cuda: whether a rank has a GPU, the only one it sees.
        limits: how long a rank may make no progress.
        elastic: whether the run goes on without hosts that are lost.
    """
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


def run_rank(cargo: Mapping[str, Any], place: WorkerInfo, attempt: list[str] | None) -> None:
    """Run one rank to its end, in a process that dies with this one.

    Args:
        cargo: of `worker_payload`.
        place: who this process is.
        attempt: what `begin_attempt` gave rank 0.

    Raises:
        RankError: it failed; the folder tells why.
        ConfigError: this host does not see the run folder.
    """
    if attempt is None:
        return
    number, token = attempt
    folder = RunFolder(Path(cargo["folder"]))
    FencingToken.verify(folder, token)
    exits: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
    with WorkerGroup(int(number), exits.put) as group:
        evidence = ProcessEvidence(folder, lambda: group.marks)
        command = [*_WORKER, str(folder.resolved)]
        environ = {**_environ(cargo, place, attempt), FENCE: token}
        group.start(place.rank, command, environ, folder.log_of(place.rank), cwd=_working_dir(cargo["cwd"]))
        code = _watch(group, exits, folder, place, TimeLimits.of(cargo["limits"]), evidence=evidence)
    if code not in _CLEAN or (code == 0 and not folder.done_of(place.rank).exists()):
        raise RankError(_explained(folder, place, code, evidence))


def _environ(cargo: Mapping[str, Any], place: WorkerInfo, attempt: list[str]) -> dict[str, str]:
    host, port = cargo["store"]
    launch = LaunchEnvironment(
        kind=cargo["kind"],
        tasks=workers(place.num_ranks),
        rank=place.rank,
        local_rank=place.local_rank,
        num_local=place.num_local,
        num_hosts=1 if place.is_alone else place.num_ranks,
        store=(host, int(port)),
    )
    identity = Identity(
        task=Task(role="worker", index=place.rank, rank=place.rank, device=cargo["device"]),
        num_ranks=place.num_ranks,
        store=launch.store,
        prefix="/".join(("attempt", *attempt)),
        attempt=int(attempt[0]),
    )
    return worker_environ({**socket_environ(launch), **os.environ, **cargo["environ"]}, identity)


def _working_dir(cwd: str) -> Path | None:
    """The folder that the command was given in, where this host has it: relative paths of the config start there."""
    return Path(cwd) if Path(cwd).is_dir() else None


def _watch(
    group: WorkerGroup,
    exits: queue.SimpleQueue[ProcessExit],
    folder: RunFolder,
    place: WorkerInfo,
    limits: TimeLimits,
    *,
    evidence: ProcessEvidence,
) -> int:
    """Wait for the end; pass a request to stop on, once."""
    watch, told = Watch(limits, folder, sees_all=place.is_alone, pid_of=evidence.pid), False
    seen = range(place.num_ranks) if place.is_alone else [place.rank]  # a host does not see the beats of another
    while True:
        try:
            return exits.get(timeout=watch.interval_s).code
        except queue.Empty:
            pass
        if not told and stop_file(folder).exists():
            told = True
            group.signal(signal_of(_reason_of_stop(folder)))
        overdue = watch.look(seen)
        if overdue is not None and overdue.rank == place.rank:  # another rank is ended by its own watch
            failure = hanging(folder, overdue, [place.rank], evidence)
            with open_regular(folder.log_of(place.rank), "ab") as log:
                log.write(f"{stacks_of(group, folder, place.rank, evidence.pid(place.rank))}\n".encode())
            write_error_report(folder.error_of(place.rank), place.rank, RankError(failure.headline))
            group.kill()


def _reason_of_stop(folder: RunFolder) -> Reason:
    said = stop_reason(folder)
    return "stopped" if said == "stopped" else "hangup" if said == "hangup" else "preempted"


def _explained(folder: RunFolder, place: WorkerInfo, code: int, evidence: ProcessEvidence) -> str:
    """What became of the rank; one that said nothing is spoken for."""
    exited = ProcessExit(attempt=0, rank=place.rank, code=code)
    headline = root_cause(folder, [exited], [], evidence).headline
    if read_error_report(folder.error_of(place.rank)) is None:
        write_error_report(folder.error_of(place.rank), place.rank, RankError(headline))
    return headline
