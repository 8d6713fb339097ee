"""End the processes of an external launch together, with one explanation of what went wrong.

No supervisor watches them: a rank that fails reports through the store and the run folder, and the others, whose next
collective fails, find the first failure. A launcher may end all processes as soon as one has ended, so no rank exits
before rank 0 has reported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from trainkit.errors import PeerError, TrainkitError, first_line
from trainkit.run.agent.failure import AT_THE_STORE, ProcessEvidence, facts_of, failure_of, first_failure
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.self_watch import ThreadWatch
from trainkit.run.begin import BegunRun
from trainkit.run.folder.run_folder import FencingToken, RunFolder
from trainkit.run.folder.run_result import ENDING, RunResult, record_failure
from trainkit.run.process.error_report import ErrorReport, Reporter, report_from_json
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.process.setup import print_on_terminal
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.strategies.collectives import RankGroup
from trainkit.strategies.rendezvous_store import Pending

_LOOK_S: Final = 0.5
"""Seconds between two looks at the other processes."""
_NOTICE_S: Final = 1.0
"""Seconds that this rank has to notice the failure of another by itself, in an exchange."""
_INTERRUPT_S: Final = 1.0
"""Seconds that the main thread then has to take the interrupt, once before and once after its exchanges are ended."""
_SAVE_S: Final = 120.0
"""Seconds that a checkpoint may take which this rank writes at that time."""
_STORE_S: Final = 60.0
"""Seconds without an answer of the store after which its host is taken for lost."""
_SHUTDOWN_GRACE_S: Final = 30.0
"""Seconds that a finished rank waits for rank 0 to write the result."""


@dataclass(kw_only=True)
class SharedEnding:
    """The end of this process's part of a training, which `ending_together` shares with the other processes."""

    report: Reporter
    """Reports an error before this rank leaves the group; ranks of local workers have written their reports already."""
    peers: PeerWatch
    """Watches the other processes: from a thread, or asked by the parent of local workers."""
    result: dict[str, Any] | None = None
    """The content of result.json on rank 0; on other ranks, after the block, how the run ended."""

    def finish(self, result: dict[str, Any] | None) -> None:
        """Store the result of this process."""
        self.result = result


@contextlib.contextmanager
def ending_together(
    barrier: ProcessBarrier, run: BegunRun, fence: FencingToken, *, runs_local_workers: bool
) -> Iterator[SharedEnding]:
    """Run this process's part of the training inside, and end it with the others.

    Raises:
        TrainkitError: the training failed. On rank 0 the failure that came first, on others a `PeerError`.
    """
    folder, rank = run.folder, barrier.launch.rank
    reports_in = None if runs_local_workers else folder
    report = Reporter(None if runs_local_workers else folder.error_of(rank), rank, barrier.publish_failure)

    def explain(error: BaseException) -> TrainkitError:
        rank_report = report(error)
        RankGroup(is_joined=True).close(failed=True)  # of a session that was not opened: others may wait in an exchange
        if rank > 0:
            reported = barrier.read_any(["reported"], within_s=AT_THE_STORE.lost + 1.0)
            if reported:  # rank 0 explains the failure
                message = reported["reported"]
                return PeerError(f"rank {rank_report.rank} ends: {message['line']}", exit_code=message["exit_code"])
        failure, silent = _first_failure(barrier, reports_in, rank_report)
        if all(lower in silent for lower in barrier.ranks if lower < rank):  # rank 0, or it cannot record the failure
            _record(barrier, folder, failure, fence)
        return failure

    limits = TimeLimits.of(run.resolved.supervisor)
    ending = SharedEnding(report=report, peers=PeerWatch(barrier, folder, report, explain, limits))
    try:
        with contextlib.nullcontext() if runs_local_workers else ending.peers:
            yield ending
        with contextlib.suppress(RuntimeError):  # the store's DistError: its host has exited
            barrier.publish(f"done/{rank}", True)
    except (Exception, SystemExit) as error:
        if rank > 0:
            sys.stderr.write("".join(traceback.format_exception(error)))  # printed to its log
        raise explain(error) from error
    result = ending.result or {}
    if rank == 0:
        barrier.publish("result", {key: result.get(key) for key in ENDING})
    else:
        message = barrier.read_any(["result", "failed/0"], within_s=_SHUTDOWN_GRACE_S)
        if "failed/0" in message:
            raise barrier.peer_error(report_from_json(message["failed/0"]["words"]))
        result = message.get("result") or RunResult.of_status("finished").content()
    ending.finish(result)


def _record(barrier: ProcessBarrier, folder: RunFolder, failure: TrainkitError, fence: FencingToken) -> None:
    """Write the failure to result.json, if the run folder is still this group's, and report it to the other ranks."""
    with contextlib.suppress(TrainkitError):  # another group owns the folder now: do not write to it
        fence.check()
        with contextlib.suppress(OSError):  # the error itself is printed on the terminal
            record_failure(folder, failure)
    with contextlib.suppress(RuntimeError):
        barrier.publish("reported", {"line": first_line(failure), "exit_code": failure.exit_code})


def _first_failure(
    barrier: ProcessBarrier, folder: RunFolder | None, report: ErrorReport
) -> tuple[TrainkitError, list[int]]:
    """Return the failure that caused the others, and the ranks without an error report: gone, or hanging.

    Without a folder the processes are hosts, each of which has found the first failure of its own ranks.
    """
    reports, arrivals, begun = {report.rank: report}, {report.rank: len(barrier.ranks)}, time.monotonic()
    for message in barrier.read_any([f"failed/{report.rank}"], within_s=0.0).values():
        arrivals[report.rank] = message["arrival"]
    while True:
        silent = [rank for rank in barrier.ranks if rank not in reports]
        # The known reports, and the processes of the other ranks: their states, if they are on this host.
        local = {rank: process for rank, process in barrier.processes_here().items() if rank in silent}
        processes = {rank: process for rank, process in barrier.processes.items() if rank in silent}
        away = {rank: f"pid {process['pid']} on {process['host']}" for rank, process in processes.items()}
        evidence = ProcessEvidence(folder, local.copy, away=away, reports=reports)
        ordered = {rank: reports[rank] for rank in sorted(reports, key=arrivals.__getitem__)}
        facts = facts_of(evidence, running=silent, reports=ordered)
        result = first_failure(facts, waited_s=time.monotonic() - begun, graces=AT_THE_STORE)
        if not isinstance(result, float):
            break
        received = barrier.read_any([f"failed/{rank}" for rank in silent], within_s=result)
        if not received:  # the time is over, or the store is lost
            break
        for message in received.values():
            peer_report = report_from_json(message["words"])
            reports[peer_report.rank], arrivals[peer_report.rank] = peer_report, message["arrival"]
    if folder is None:
        first = first_failure([peer for peer in facts if peer.report is not None])
        assert isinstance(first, tuple)
        return reports[first[0].rank].error(), silent
    return failure_of(evidence, facts).error(), silent


class PeerWatch(ThreadWatch):
    """Ends this process if another process of the launch has failed, has ended, or is stopped by a signal.

    An exchange with such a process often ends by itself; a wait for it, or other work, does not.
    """

    def __init__(
        self,
        barrier: ProcessBarrier,
        folder: RunFolder,
        report: Reporter,
        explain: Callable[[BaseException], TrainkitError],
        limits: TimeLimits,
    ) -> None:
        super().__init__(interval_s=_LOOK_S, grace_s=_INTERRUPT_S)
        self._barrier, self._folder, self._report, self._explain = barrier, folder, report, explain
        self._limits = limits
        self._pending: Pending[str] | None = None
        self._answered_at = time.monotonic()
        self._lost_at: float | None = None

    def look(self) -> TrainkitError | None:
        """Return the error of another process, once this one had some time to notice it by itself."""
        if self._report.report is not None:
            return None
        now, reason = time.monotonic(), self._reason()
        if reason is None:
            return None
        self._lost_at = self._lost_at or now
        heartbeat = read_heartbeat(self._folder.heartbeat_of(self._barrier.launch.rank))
        saves = heartbeat is not None and heartbeat.phase == "save" and now - self._lost_at < _SAVE_S
        return None if saves or now - self._lost_at < _NOTICE_S else PeerError(reason)

    def leave(self, error: TrainkitError, stack: str) -> None:
        """End the exchange in which the main thread waits; if that does not end it, explain the error, and exit."""
        RankGroup(is_joined=True).close(failed=True)
        if self._taken.wait(_INTERRUPT_S):
            return
        failure = self._explain(error)
        print_on_terminal(f"{failure}\n{stack}")
        os._exit(failure.exit_code)

    def _reason(self) -> str | None:
        """Return why this process has to end; None: it has not."""
        now = time.monotonic()
        stopped = self._barrier.stopped_here(
            lambda rank: self._limits.of_stopped(read_heartbeat(self._folder.heartbeat_of(rank))).seconds
        )
        if stopped is not None:
            return f"{self._barrier.name_of(stopped)} is stopped by a signal"
        if self._pending is None or self._pending.wait(0):  # never waits for the store: its process may be stopped
            answer = None
            if self._pending is not None:
                with contextlib.suppress(RuntimeError):
                    answer, self._answered_at = self._pending.result(), now
            self._pending = Pending(self._published)
            if answer:
                return answer
        if now - self._answered_at > _STORE_S:
            return f"{self._barrier.launch.place_of(0)} cannot be reached any more, nor can the store"
        return None

    def _published(self) -> str:
        """Return what the store says of a failure; empty if there is none."""
        store, prefix = self._barrier.store, f"{self._barrier.prefix}/done"
        ended = [rank for rank in self._barrier.ended_here() if not store.has(f"{prefix}/{rank}")]
        failures = self._barrier.failures()  # after `ended`: a process writes its report before it ends
        if failures:
            return f"rank {failures[0].rank}: {failures[0].summary}"
        return f"{self._barrier.name_of(ended[0])} has ended" if ended else ""
