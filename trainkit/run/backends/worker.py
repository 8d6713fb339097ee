"""Run a rank in a process that a backend started: start a trainkit worker, watch it, report its end to the backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainkit.cluster.launch import LaunchEnvironment, socket_environ, workers
from trainkit.cluster.tasks import Identity, Task
from trainkit.files import open_regular
from trainkit.run.agent.agent import Agent, AgentSettings, Launch
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.backends.attempt import RankError, stop_file, stop_reason
from trainkit.run.folder.fencing_token import VARIABLE as FENCE
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import read_error_report, write_error_report
from trainkit.run.process.fork_server import ENTRY
from trainkit.run.process.worker_group import WorkerGroup, worker_environ
from trainkit.run.signals import Reason


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


class EngineLaunch(Launch):
    """One rank in a process that a backend started, for its agent.

    Args:
        folder: the run folder.
        payload: what the driver sends to every rank.
        info: the rank.
        attempt: the number of the attempt of the backend, and the fencing token of the run folder.
    """

    signals: ClassVar[Mapping[signal.Signals, Reason]] = {}
    """None: the driver alone stops a run, by a file of the folder."""

    def __init__(self, folder: RunFolder, payload: Mapping[str, Any], info: WorkerInfo, attempt: Sequence[str]) -> None:
        super().__init__(folder)
        self.payload, self.info, self.attempt = payload, info, attempt

    @property
    def sees_all(self) -> bool:
        """Whether all ranks are on this host."""
        return self.info.is_alone

    @property
    def cwd(self) -> Path | None:
        """The folder of the driver, in which relative paths of the config start, if it exists on this host."""
        cwd = Path(self.payload["cwd"])
        return cwd if cwd.is_dir() else None

    def identity(self, task: Task, num_ranks: int, attempt: int, life: int) -> Identity:
        """Return the identity of the rank in an attempt of the backend."""
        del num_ranks, life
        host, port = self.payload["store"]
        return Identity(
            task=task,
            num_ranks=self.info.num_ranks,
            store=(host, int(port)),
            prefix="/".join(("attempt", *self.attempt)),
            attempt=attempt,
        )

    def environ(self, identity: Identity) -> dict[str, str]:
        """Return the environment of the worker, with the variables that the driver sends."""
        info, host_port = self.info, identity.store
        assert host_port is not None
        launch = LaunchEnvironment(
            kind=self.payload["kind"],
            tasks=workers(info.num_ranks),
            rank=info.rank,
            local_rank=info.local_rank,
            num_local=info.num_local,
            num_hosts=1 if info.is_alone else info.num_ranks,
            store=host_port,
        )
        environ = worker_environ({**socket_environ(launch), **os.environ, **self.payload["environ"]}, identity)
        return {**environ, FENCE: self.attempt[1]}

    def log_of(self, task: Task) -> Path:
        """Return the log of a rank; the driver prints that of rank 0."""
        return self.folder.log_of(task.rank)

    def watched(self, running: Collection[int]) -> Collection[int]:
        """Return the ranks of this host: those that wait for one behind them are not blamed."""
        return range(self.info.num_ranks) if self.info.is_alone else running

    def stop_requested(self) -> Reason | None:
        """Return the reason of the driver's request to stop."""
        if not stop_file(self.folder).exists():
            return None
        reason = stop_reason(self.folder)
        return "stopped" if reason == "stopped" else "hangup" if reason == "hangup" else "preempted"


def run_rank(payload: Mapping[str, Any], info: WorkerInfo, attempt: list[str] | None) -> None:
    """Run one rank until it ends, in a process that dies with this one.

    Raises:
        RankError: the rank failed; the error report is in the folder.
        ConfigError: this host does not see the run folder.
    """
    if attempt is None:
        return
    folder = RunFolder(Path(payload["folder"]))
    FencingToken.verify(folder, attempt[1])
    task = Task(role="worker", index=info.rank, rank=info.rank, device=payload["device"])
    with Agent(
        [task],
        AgentSettings(max_restarts=0, limits=TimeLimits.of(payload["limits"])),
        EngineLaunch(folder, payload, info, attempt),
        command=[*ENTRY, str(folder.resolved)],
        groups=WorkerGroup,
    ) as agent:
        failure = agent.run(int(attempt[0]), [task])
    if failure is None:
        return
    if failure.hang:
        with open_regular(folder.log_of(info.rank), "ab") as log:
            log.write(f"{failure.detail}\n".encode())
    if read_error_report(folder.error_of(info.rank)) is None:
        write_error_report(folder.error_of(info.rank), info.rank, RankError(failure.headline))
    raise RankError(failure.headline)
