"""Run one task of a run, or of an evaluation or prediction, in its own process.

    python -m trainkit.run.worker_main RUN/resolved.yaml

The environment holds the identity of the process (`trainkit.cluster.tasks`), the run folder holds everything else.
Hydra is not imported.

A rank can be started by hand, for example in a debugger: start every rank in its own terminal, with a free port that
they share. Rank 0 then hosts the store.

    export TRAINKIT_RANKS=2 TRAINKIT_STORE=127.0.0.1:29400
    TRAINKIT_RANK=0 python -m pdb -m trainkit.run.worker_main RUN/resolved.yaml
    TRAINKIT_RANK=1 python -m trainkit.run.worker_main RUN/resolved.yaml

A run folder cannot allow packages: if the run names classes of your own, set `TRAINKIT_ALLOW_PACKAGES=my_package`.

Exit codes: those of the exception (`trainkit.errors`); 129, 130 and 143 for a run that was stopped and can be resumed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.tasks import Identity
from trainkit.config.targets.allowed import allow_packages, packages_from
from trainkit.config.yaml_files import config_dirs_from, with_config_dirs
from trainkit.files import as_storage_error, open_regular
from trainkit.redaction import masked_output
from trainkit.report.train_log import recorded_output
from trainkit.run.folder.run_folder import FENCE, FencingToken, RunFolder
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.process.worker_group import JOB, LIFELINE, watch_parent
from trainkit.run.signals import (
    EXIT_CODES,
    STACKS_SIGNAL,
    StopFlag,
    exit_without_teardown,
    stop_signals,
    worker_signals,
)
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.trainer import failpoints
from trainkit.trainer.ownership import uncontested

if TYPE_CHECKING:
    from typing import Any


def main(arguments: list[str]) -> int:
    """Run the task of this process, whose argument is the path of `resolved.yaml`; return the exit code."""
    signals = worker_signals() if LIFELINE in os.environ else stop_signals()
    with masked_output(), StopFlag(signals=signals) as stop:  # first, so that no signal is lost
        supervised = watch_parent(os.environ)
        if len(arguments) != 1:
            print("usage: python -m trainkit.run.worker_main RUN/resolved.yaml", file=sys.stderr)  # noqa: T201
            return 2
        resolved = Path(arguments[0])
        folder = RunFolder(resolved.parent)
        rank = 0
        report = Reporter(folder.error_of(rank), rank)
        try:
            identity = Identity.from_environ(os.environ)
            rank = identity.task.rank
            report = Reporter(folder.error_of(rank), rank)
            with contextlib.suppress(OSError):  # what `top` and `ps -eo pid,comm` show, on Linux
                Path("/proc/self/comm").write_text(str(identity.task))
            if supervised and identity.store is not None:
                Heartbeat(folder.heartbeat_of(rank)).close()  # the following imports take several seconds
            if rank > 0 and not supervised:
                line = f"{identity.task}, rank {rank} of {identity.num_ranks}: its output stays in this terminal"
                print(line, file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal
            if failpoints.ARMED:
                failpoints.hit("start", 0)
            with (
                _recorded(folder, rank, supervised=supervised),
                _stacks_on_demand(folder, rank),
                _store_of_hand_started(identity, supervised=supervised),
            ):
                result = _run(resolved, identity, folder, stop, report)
            with contextlib.suppress(OSError):  # the folder was removed: the parent detects it
                folder.done_of(rank).touch()
        except KeyboardInterrupt:
            return EXIT_CODES["stopped"]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - top level: every error is reported
            error_report = report(as_storage_error(error, folder.path) or error)
            if rank > 0 or not supervised:  # the supervisor prints the error of rank 0
                with _recorded(folder, rank, supervised=True):
                    print(error_report.traceback, file=sys.stderr, flush=True)  # noqa: T201
            return error_report.exit_code
        status = (result or {}).get("status", "finished")
        return EXIT_CODES.get(status, 1) if stop.requested else 0


def _run(
    resolved: Path, identity: Identity, folder: RunFolder, stop: StopFlag, report: Reporter
) -> dict[str, Any] | None:
    from trainkit.config.schema import load_resolved  # noqa: PLC0415 - slow; the stop flag must be set first
    from trainkit.run.planning.plan import plan_from_environ  # noqa: PLC0415 - imports torch
    from trainkit.run.task import TaskRun  # noqa: PLC0415 - imports torch

    cfg = load_resolved(resolved)
    confirm = FencingToken.from_environ(folder, os.environ).check if FENCE in os.environ else uncontested
    with allow_packages(packages_from(os.environ)), with_config_dirs(config_dirs_from(os.environ)):
        if os.environ.pop(JOB, ""):
            from trainkit.run.jobs import run_task_of_job  # noqa: PLC0415 - imports torch

            return run_task_of_job(cfg, identity, folder, stop, report)
        plan = plan_from_environ(os.environ, cfg)
        task = TaskRun(cfg=cfg, identity=identity, folder=folder, stop=stop, plan=plan, confirm=confirm, report=report)
        return task.run()


@contextlib.contextmanager
def _recorded(folder: RunFolder, rank: int, *, supervised: bool) -> Iterator[None]:
    """Record the output of rank 0, unless it already goes to a log file that the driver of a backend prints."""
    into_log = False
    with contextlib.suppress(OSError):
        into_log = os.path.samestat(os.fstat(1), folder.log_of(rank).stat())
    if rank > 0 or into_log:
        yield
        return
    with recorded_output(folder.log, separated=not supervised):
        yield


@contextlib.contextmanager
def _stacks_on_demand(folder: RunFolder, rank: int) -> Iterator[None]:
    """Write the stacks of all threads on SIGUSR2, even while C code hangs; crashes of C code are reported on stderr."""
    faulthandler.enable()
    folder.open_live()
    with open_regular(folder.stacks_of(rank), "wb") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])  # a pending one arrives now
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # without a handler it would end this process
            faulthandler.unregister(STACKS_SIGNAL)


@contextlib.contextmanager
def _store_of_hand_started(identity: Identity, *, supervised: bool) -> Iterator[None]:
    if supervised or identity.store is None or identity.task.rank > 0:
        yield
        return
    with HostedStore(identity.store) as store:
        store.open()
        yield


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
