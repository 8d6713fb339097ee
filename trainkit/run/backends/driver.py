"""Run on a process backend, from the process that the user started."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import CrashLoopError, StoppedError, TrainingError, TrainkitError, UnreadableError
from trainkit.files import open_regular, write_atomically
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.backends.attempt import failure_in, forget_attempts, refusal_in, stop_file
from trainkit.run.backends.worker import worker_payload
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_result import RunResult, record_failure
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process_backend import CARRIED, BackendConnection, BackendJob, ProcessBackend
from trainkit.run.signals import StopFlag, stop_error
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.trainer.ownership import free_name

_POLL_S: Final = 0.2
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
    forget_attempts(folder)
    with ExitStack() as stack:
        connection = stack.enter_context(backend.connect(num_ranks=len(plan.tasks), uses_gpus=cuda))
        store = stack.enter_context(HostedStore((connection.host, 0)))
        store.open()
        environ = {name: os.environ[name] for name in CARRIED if name in os.environ}
        payload = worker_payload(
            folder,
            kind=backend.name,
            store=store.address,
            environ={**environ, **package_environ(), **config_dir_environ()},
            elastic=plan.cfg.elastic.min_replicas is not None,
            cuda=cuda,
            limits=TimeLimits.of(plan.cfg.supervisor),
        )
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
        return _until_done(connection, job, folder, stop, max_restarts=job.max_restarts)


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


def _until_done(
    connection: BackendConnection, job: BackendJob, folder: RunFolder, stop: StopFlag, *, max_restarts: int
) -> dict[str, Any]:
    failures: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(connection, job, failures), name="backend", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if stop.requested and not stop_file(folder).exists():
                write_atomically(stop_file(folder), stop.requested)
    except KeyboardInterrupt:
        raise _recorded(folder, StoppedError("stopped at once.")) from None
    found = failure_in(folder)
    if found is not None and (refusal := refusal_in(folder)):
        raise _recorded(folder, CrashLoopError(f"{refusal}: {found.error()}"))
    if not failures and (found is None or not found.is_permanent):
        return folder.read_result() or RunResult.of_status(stop.requested or "finished").content()
    if found is not None and found.is_permanent:
        raise _recorded(folder, found.error())
    if stop.requested:
        what = f"{found.headline if found else failures[0]} It was asked to stop."
        raise _recorded(folder, stop_error(stop.requested, what))
    if found is None:
        raise _recorded(
            folder, TrainingError(f"{job.payload['kind']} ended the run: {_without_java_frames(failures[0])}")
        )
    if max_restarts == 0:
        raise _recorded(folder, found.error())
    raise _recorded(folder, CrashLoopError(f"gave up after {max_restarts} restarts: {found.error()}"))


def _without_java_frames(error: BaseException) -> str:
    """Return the message of a backend without the stack frames of its Java code."""
    return "\n".join(line for line in str(error).splitlines() if not line.startswith("\tat "))


def _run(connection: BackendConnection, job: BackendJob, failures: list[BaseException]) -> None:
    try:
        connection.run(job)
    except BaseException as error:  # noqa: BLE001 - reported by the waiting thread
        failures.append(error)


def _recorded(folder: RunFolder, error: TrainkitError) -> TrainkitError:
    record_failure(folder, error)
    return error


@contextmanager
def _echo_rank0_log(folder: RunFolder) -> Iterator[None]:
    """Print the output of rank 0, wherever it runs, as its log grows."""
    log, ended = folder.log_of(0), threading.Event()
    position = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        nonlocal position
        while True:
            last = ended.wait(_POLL_S)
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
