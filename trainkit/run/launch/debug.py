"""Debug one rank of a run in the terminal: that rank is this process, and the others are its children.

The terminal and its signals belong to this process, so `breakpoint()` and Ctrl-C work in any code. The others lead
sessions of their own, write into their logs, and end with this process. There is one attempt, without time limits.
"""

from __future__ import annotations

import bdb
import math
import os
import pdb  # noqa: T100 - the purpose
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch

from trainkit.cluster.tasks import Identity
from trainkit.config.schema import RunConfig
from trainkit.errors import StoppedError, TrainkitError
from trainkit.run.agent.failure import Failure, ProcessEvidence, facts_of, failure_of, is_clean
from trainkit.run.agent.self_watch import ThreadWatch, in_debugger
from trainkit.run.agent.supervisor import LocalLaunch
from trainkit.run.begin import BREAKPOINT, Result
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_result import record_failure
from trainkit.run.planning.plan import RunPlan, plan_from_environ, plan_to_environ
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.signals import StopFlag, signal_of
from trainkit.run.task import TaskRun
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.trainer.ownership import print_notice

_GRACE_S: Final = 1.0
"""Seconds that a rank that failed first has to end after the failure of this one."""
_AUXILIARY_S: Final = 5.0
"""Seconds that auxiliary tasks have to end after the training."""


def debug(rank: int, plan: RunPlan, cfg: RunConfig, folder: RunFolder, *, pass_fds: Sequence[int]) -> Result:
    """Run one rank in this process, and the others as its children, until all have ended.

    Args:
        rank: the rank of this process.
        plan: the plan of the run.
        cfg: the content of `resolved.yaml`.
        folder: the run folder; the caller holds its lock.
        pass_fds: descriptors for the other ranks: the lock.

    Returns:
        The content of `result.json`.

    Raises:
        StoppedError: the debugger was quit, or Ctrl-C came twice; nothing was saved.
        TrainkitError: another rank failed first.
    """
    command, others = [*ENTRY, str(folder.resolved)], _OtherRanks(folder, rank)
    training = {task.rank for task in plan.training_tasks}
    folder.begin()
    folder.open_live()
    with HostedStore() as store, worker_group_factory(command, plan.tasks, pass_fds=pass_fds) as groups:
        launch = LocalLaunch(folder, plan_to_environ(plan), store)
        identities = [launch.identity(task, len(training) + task.is_evaluator, 0, 0) for task in plan.tasks]
        identity = identities[rank] if len(identities) > 1 else Identity.solo(plan.tasks[0].device)
        with groups(0, others.ended) as group, StopFlag(lambda reason: group.signal(signal_of(reason))) as stop:
            for peer in identities:
                if peer.task.rank != rank:
                    environ = {**launch.environ(peer), BREAKPOINT: "0"}  # it has no terminal to stop in
                    group.start(peer.task.rank, command, environ, folder.log_of(peer.task.rank))
            store.open()
            variables = launch.environ(identity)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", variables["GLOO_SOCKET_IFNAME"])
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
            planned, report = plan_from_environ(variables, cfg), Reporter(folder.error_of(rank), rank)
            task = TaskRun(cfg=cfg, identity=identity, folder=folder, stop=stop, plan=planned, report=report)
            print_notice(f"rank {rank} is this process; the logs of the others: {folder.log_of(0).parent}")
            try:
                with others, _quitting(group.kill):
                    task.run()
                    until = math.inf
                    while group.running and time.monotonic() < until:
                        time.sleep(0.05)
                        if until == math.inf and not training & {*group.running}:
                            until = time.monotonic() + _AUXILIARY_S
                    if (failure := others.failure()) is not None:
                        raise failure.error()
            except KeyboardInterrupt:
                group.kill()
                stopped = StoppedError("stopped in the debugger; nothing was saved.")
                record_failure(folder, stopped)
                raise stopped from None
            except Exception:
                time.sleep(_GRACE_S)
                if (failure := others.failure()) is None or failure.rank == rank:
                    raise
                record_failure(folder, error := failure.error())
                raise error from None
    return task.result if rank == 0 else folder.read_result()


class _OtherRanks(ThreadWatch):
    """The other ranks; raises the failure of one in this process, unless a debugger holds it."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(interval_s=_GRACE_S, grace_s=_GRACE_S)
        self._folder, self._rank = folder, rank
        self._failed: list[ProcessExit] = []
        self._is_known = False

    def ended(self, exited: ProcessExit) -> None:
        """Record the exit of a rank, in any thread."""
        if not is_clean(self._folder, exited, stopping=True):
            self._failed.append(exited)

    def failure(self) -> Failure | None:
        """Return the failure that came first; None: no other rank has failed."""
        if not self._failed:
            return None
        evidence = ProcessEvidence(self._folder)
        return failure_of(evidence, facts_of(evidence, exits=[*self._failed], running=[self._rank]))

    def look(self) -> TrainkitError | None:
        """Return the error of a rank that has failed, at the second look: this rank may report the same failure."""
        was_known, self._is_known = self._is_known, bool(self._failed)
        failure = None if not was_known or in_debugger(self._frame()) else self.failure()
        return None if failure is None else failure.error()

    def leave(self, error: TrainkitError, stack: str) -> None:
        """Exit the process, which waits in C code for a rank that has failed."""
        record_failure(self._folder, error)
        sys.stderr.write(f"{stack}\n{error}\n")
        os._exit(error.exit_code)


@contextmanager
def _quitting(end_others: Callable[[], None]) -> Iterator[None]:
    """Let the end of a debugger end the run, like a second Ctrl-C, while the block runs: `q`, or Ctrl-D."""

    class Debugger(pdb.Pdb):
        def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
            try:
                return super().trace_dispatch(frame, event, arg)
            except bdb.BdbQuit:
                end_others()
                raise KeyboardInterrupt from None

    before = pdb.Pdb
    pdb.Pdb = Debugger  # type: ignore[misc] # what breakpoint() and pdb.set_trace() create
    try:
        yield
    finally:
        pdb.Pdb = before  # type: ignore[misc]
