"""Run on a process backend: from the process that the user started, and each rank in a process that the backend
started.

The processes of an attempt communicate through the run folder that they share.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

from trainkit.cluster.launch import socket_environ
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import (
    AbsentFileError,
    CrashLoopError,
    StopKind,
    StoppedError,
    TrainingError,
    TrainkitError,
    UnreadableError,
)
from trainkit.files import Kind, open_regular, read_map, read_text, write_atomically, write_json_atomically
from trainkit.run.agent.agent import Agent, AgentSettings, Launch
from trainkit.run.agent.failure import Failure, ProcessEvidence, facts_of, failure_of
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.policy import ExternalRestart, record_relaunch
from trainkit.run.folder.run_folder import FENCE, FencingToken, RunFolder
from trainkit.run.folder.run_result import RunResult, record_failure
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.error_report import read_error_report, reports_in, write_error_report
from trainkit.run.process.fork_server import ENTRY
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup, worker_environ
from trainkit.run.process_backend import CARRIED, BackendConnection, BackendJob, ProcessBackend
from trainkit.run.signals import StopFlag, stop_error
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.trainer.ownership import free_name

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_KINDS: Final[dict[str, Kind]] = {
    "count": int, "key": str, "attempt": (list, type(None)), "raised": list, "refusal": str,
}  # fmt: skip
_ATTEMPTS: Final = ".attempts"
"""The file of a run folder that counts the attempts."""


class RankError(RuntimeError):
    """A rank failed: the backend restarts all ranks."""


def begin_attempt(payload: Mapping[str, Any], key: str = "") -> list[str] | None:
    """Prepare the folder for another attempt; for rank 0, before any other rank begins.

    Returns:
        The number of the attempt and its fencing token, for every rank; None if a further attempt would fail in the
        same way.
    """
    folder = RunFolder(Path(payload["folder"]))
    number = int(_attempts(folder).get("count", 0))
    last = failure_in(folder) if number else None
    attempt, relaunch = None, ExternalRestart(raised=frozenset(), refusal=None)
    if number and (last is None or not last.is_permanent):
        before, tolerant = _attempts(folder).get("raised", ()), payload.get("elastic", False)
        relaunch = record_relaunch(folder, last, before=before, tolerant=tolerant)
    if (last is None or not last.is_permanent) and relaunch.refusal is None:
        if number:
            folder.logs.mkdir(parents=True, exist_ok=True)
            with open_regular(folder.log_of(0), "ab") as file:
                headline = last.headline if last else "The processes have ended."
                file.write(f"{headline} {payload['kind']} starts all again.\n".encode())
        folder.begin()
        folder.open_live()
        attempt = [str(number), FencingToken.acquire(folder).token]
    noted = {"raised": relaunch.to_json(), "refusal": relaunch.refusal or ""}
    write_json_atomically(folder.path / _ATTEMPTS, {"count": number + 1, "key": key, "attempt": attempt, **noted})
    return attempt


def wait_for_attempt(payload: Mapping[str, Any], key: str) -> list[str] | None:
    """Wait for the result of `begin_attempt` on rank 0, and return it; for the other ranks.

    Raises:
        RankError: rank 0 did not begin, or this host does not see its folder.
    """
    folder, deadline = RunFolder(Path(payload["folder"])), time.monotonic() + _TIMEOUT_S
    while (attempts := _attempts(folder)).get("key") != key:
        if time.monotonic() > deadline:
            raise RankError(f"rank 0 did not begin within {_TIMEOUT_S:g} s in {folder.path}. Do all hosts share it?")
        time.sleep(_POLL_S)
    attempt: list[str] | None = attempts["attempt"]
    return attempt


def _attempts(folder: RunFolder) -> dict[str, Any]:
    try:
        return read_map(folder.path / _ATTEMPTS, _KINDS)
    except AbsentFileError:
        return {}


def stop_file(folder: RunFolder) -> Path:
    """Return the path of the file that asks every rank to save and stop; its content is the reason."""
    return folder.path / ".stop"


def may_restart(payload: Mapping[str, Any]) -> bool:
    """Return whether a failed attempt is worth another: no stop was requested, and the failure is not permanent."""
    folder = RunFolder(Path(payload["folder"]))
    last = failure_in(folder)
    return not stop_file(folder).exists() and (last is None or not last.is_permanent)


def failure_in(folder: RunFolder) -> Failure | None:
    """Return the first failure of the last attempt; None if no rank left an error report."""
    if not (reports := reports_in(folder)):
        return None
    exits = [ProcessExit(attempt=0, rank=rank, code=report.exit_code) for rank, report in reports.items()]
    evidence = ProcessEvidence(folder)
    failure = failure_of(evidence, facts_of(evidence, exits=exits))
    report = reports[failure.rank]
    if report.is_secondary:
        return replace(
            failure, headline=f"rank {failure.rank} lost its connection to another rank, which wrote no error report."
        )
    return replace(failure, headline=report.message) if report.kinds[0] == RankError.__name__ else failure


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


class EngineLaunch(Launch):
    """One rank in a process that a backend started, for its agent.

    Args:
        folder: the run folder.
        payload: what the driver sends to every rank.
        info: the rank.
        attempt: the number of the attempt of the backend, and the fencing token of the run folder.
    """

    signals: ClassVar[Mapping[signal.Signals, StopKind]] = {}
    """None: the driver alone stops a run, by a file of the folder."""

    def __init__(self, folder: RunFolder, payload: Mapping[str, Any], info: WorkerInfo, attempt: Sequence[str]) -> None:
        super().__init__(folder)
        self.payload, self.info, self.attempt = payload, info, attempt
        self.sees_all, cwd = info.is_alone, Path(payload["cwd"])
        self.cwd = cwd if cwd.is_dir() else None  # in the folder of the driver relative paths of the config start

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
        sockets = socket_environ(self.payload["store"][0], on_one_host=self.info.is_alone or self.info.num_ranks == 1)
        environ = worker_environ({**sockets, **os.environ, **self.payload["environ"]}, identity)
        return {**environ, FENCE: self.attempt[1]}

    def log_of(self, task: Task) -> Path:
        """Return the log of a rank; the driver prints that of rank 0."""
        return self.folder.log_of(task.rank)

    def watched(self, running: Collection[int]) -> Collection[int]:
        """Return the ranks of this host: those that wait for one behind them are not blamed."""
        return range(self.info.num_ranks) if self.info.is_alone else running

    def stop_requested(self) -> StopKind | None:
        """Return the reason of the driver's request to stop."""
        try:
            text = read_text(stop_file(self.folder), limit=64)
        except AbsentFileError:
            return None
        except UnreadableError:
            text = ""
        return next((kind for kind in get_args(StopKind) if kind == text), "preempted")


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
    settings = AgentSettings(max_restarts=0, limits=TimeLimits.of(payload["limits"]))
    launch, command = EngineLaunch(folder, payload, info, attempt), [*ENTRY, str(folder.resolved)]
    agent = Agent([task], settings, launch, command=command, groups=WorkerGroup)
    with agent.stop:
        failure = agent.run(int(attempt[0]), [task])
    if failure is None:
        return
    if failure.hang:
        with open_regular(folder.log_of(info.rank), "ab") as log:
            log.write(f"{failure.detail}\n".encode())
    if read_error_report(folder.error_of(info.rank)) is None:
        write_error_report(folder.error_of(info.rank), info.rank, RankError(failure.headline))
    raise RankError(failure.headline)


_LOG_POLL_S: Final = 0.2
_CHUNK: Final = 1 << 16


def run_on(backend: ProcessBackend, plan: RunPlan, folder: RunFolder) -> dict[str, Any]:
    """Run a plan on a process backend until it ends.

    Ctrl-C, SIGTERM and SIGHUP are forwarded as a request to save and stop; a second Ctrl-C ends everything at once.
    Call this function from the main thread: other threads receive no signals.

    Returns:
        The content of `result.json`.

    Raises:
        StoppedError, TerminatedError, HangupError: the run was stopped before the workers could write a result.
        CrashLoopError: the backend gave up restarting the processes.
        TrainkitError: a worker raised it, or the backend failed.
    """
    cuda = any(task.device.startswith("cuda") for task in plan.tasks)
    for file in (folder.path / _ATTEMPTS, stop_file(folder)):
        file.unlink(missing_ok=True)
    with ExitStack() as stack:
        connection = stack.enter_context(backend.connect(num_ranks=len(plan.tasks), uses_gpus=cuda))
        store = stack.enter_context(HostedStore((connection.host, 0)))
        store.open()
        environ = {name: os.environ[name] for name in CARRIED if name in os.environ}
        payload = {
            "folder": str(folder.path.absolute()),
            "cwd": str(Path.cwd()),
            "kind": backend.name,
            "store": list(store.address),
            "environ": {**environ, **package_environ(), **config_dir_environ()},
            "device": "cuda:0" if cuda else "cpu",
            "limits": asdict(TimeLimits.of(plan.cfg.supervisor)),
            "elastic": plan.cfg.elastic.min_replicas is not None,
        }
        job = BackendJob(
            num_ranks=len(plan.tasks),
            min_ranks=plan.cfg.elastic.min_replicas,
            retry_s=plan.cfg.elastic.retry_s,
            max_restarts=plan.cfg.supervisor.max_restarts,
            uses_gpus=cuda,
            payload=payload,
            folder=str(stack.enter_context(_scratch(folder)).absolute()),
        )
        stack.enter_context(_echo_rank0_log(folder))
        stop = stack.enter_context(StopFlag())
        return _until_done(connection, job, folder, stop)


@contextmanager
def _scratch(folder: RunFolder) -> Iterator[Path]:
    """Make a folder for files of the backend; it is deleted at the end, and so is one that a killed run has left."""
    owner = folder.take()
    owner.remove_tree(folder.path / ".engine")
    path = free_name(folder.path / ".engine")
    owner.make(path)
    try:
        yield path
    finally:
        owner.remove_tree(path)


def _until_done(connection: BackendConnection, job: BackendJob, folder: RunFolder, stop: StopFlag) -> dict[str, Any]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            connection.run(job)
        except BaseException as error:  # noqa: BLE001 - reported by the waiting thread
            failures.append(error)

    thread = threading.Thread(target=run, name="backend", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOG_POLL_S)
            if stop.requested and not stop_file(folder).exists():
                write_atomically(stop_file(folder), stop.requested)
        error = _error_of(job, folder, stop, failures)
    except KeyboardInterrupt:
        error = StoppedError("stopped at once.")
    if error is None:
        return folder.read_result() or RunResult.of_status(stop.requested or "finished").content()
    record_failure(folder, error)
    raise error


def _error_of(
    job: BackendJob, folder: RunFolder, stop: StopFlag, failures: list[BaseException]
) -> TrainkitError | None:
    """Return the error of a job that has ended; None: it was done, or has saved and stopped."""
    failure = failure_in(folder)
    if failure is not None and (refusal := str(_attempts(folder).get("refusal", ""))):
        return CrashLoopError(f"{refusal}: {failure.error()}")
    if failure is not None and failure.is_permanent:
        return failure.error()
    if not failures:
        return None
    if stop.requested:
        return stop_error(stop.requested, f"{failure.headline if failure else failures[0]} It was asked to stop.")
    if failure is None:
        lines = str(failures[0]).splitlines()
        text = "\n".join(line for line in lines if not line.startswith("\tat "))  # without the frames of Java
        return TrainingError(f"{job.payload['kind']} ended the run: {text}")
    error = failure.error()
    return CrashLoopError(f"gave up after {job.max_restarts} restarts: {error}") if job.max_restarts else error


@contextmanager
def _echo_rank0_log(folder: RunFolder) -> Iterator[None]:
    """Print the output of rank 0, wherever it runs, as its log grows."""
    log, ended = folder.log_of(0), threading.Event()
    position = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        nonlocal position
        while True:
            last = ended.wait(_LOG_POLL_S)
            with suppress(UnreadableError), open_regular(log) as file:
                file.seek(position)
                while content := file.read(_CHUNK):
                    position += len(content)
                    sys.stdout.write(content.decode("utf-8", errors="replace"))
                    sys.stdout.flush()
            if last:
                return

    thread = threading.Thread(target=follow, name="output of rank 0", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
