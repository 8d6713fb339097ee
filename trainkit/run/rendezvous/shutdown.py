"""End the processes of an external launch together, with one explanation of what went wrong.

No supervisor watches them: a rank that fails reports through the store and the run folder, and the others, whose next
collective fails, find the first failure. A launcher may end all processes as soon as one has ended, so no rank exits
before rank 0 has reported.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainkit.cluster.host import ProcessId, host_id
from trainkit.errors import PeerError, TrainkitError
from trainkit.frames import first_line
from trainkit.run.folder.rollbacks import skipped_in
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import ProcessEvidence
from trainkit.run.process.error_report import ErrorReport, Reporter, report_from_json
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.run.supervisor.failure import root_cause, unresponsive_rank

_Processes = Mapping[int, Mapping[str, Any]]
"""The result of `_own_process` on each rank."""
_GRACE_S: Final = 0.2
"""Seconds that other ranks have to write their error reports after this rank has failed by itself."""
_GRACE_AFTER_LOSS_S: Final = 3.0
"""The same for a rank that only lost its connection to another: the rank that failed first may still be writing its
report.
"""
_SHUTDOWN_GRACE_S: Final = 30.0
"""Seconds that a finished rank waits for rank 0 to write the result."""


@dataclass(kw_only=True)
class SharedEnding:
    """The end of this process's part of a training, which `ending_together` shares with the other processes."""

    report: Reporter
    """Reports an error before this rank leaves the group; ranks of local workers have written their reports already."""
    result: dict[str, Any] | None = None
    """The content of result.json on rank 0; on other ranks, after the block, the status and reason."""

    def finish(self, result: dict[str, Any] | None) -> None:
        """Store the result of this process."""
        self.result = result


@contextlib.contextmanager
def ending_together(
    barrier: ProcessBarrier,
    folder: RunFolder,
    *,
    confirm: Callable[[], None],
    runs_local_workers: bool = False,
) -> Iterator[SharedEnding]:
    """Run this process's part of the training inside, and end it with the others.

    Raises:
        TrainkitError: the training failed. On rank 0 the failure that came first, on others a `PeerError`.
    """
    # Exchanged before a rank can be lost: the store may be lost with it.
    processes = dict(zip(barrier.ranks, barrier.all_gather_object(_own_process()), strict=True))
    ending = SharedEnding(report=_reporter(barrier, folder, runs_local_workers=runs_local_workers))
    try:
        yield ending
    except (Exception, SystemExit) as error:
        report = ending.report(error)
        if barrier.launch.rank > 0:
            sys.stderr.write("".join(traceback.format_exception(error)))  # printed to its log
            raise _follower_error(barrier, None if runs_local_workers else folder, report, processes) from error
        failure = _first_failure(barrier, None if runs_local_workers else folder, report, processes)
        _record(barrier, folder, failure, confirm)
        raise failure from error
    if barrier.launch.rank > 0:
        ending.finish(_await_rank0_result(barrier))
        return
    result = ending.result or {}
    ending.finish(result)
    barrier.publish("result", {key: result.get(key) for key in ("status", "reason")})


def _reporter(barrier: ProcessBarrier, folder: RunFolder, *, runs_local_workers: bool) -> Reporter:
    """Return a reporter of this rank's error to the folder and to the store, which also counts the order of arrival."""
    rank = barrier.launch.rank

    def publish(report: ErrorReport) -> None:
        barrier.mark_store_suspect()
        with contextlib.suppress(RuntimeError):
            barrier.publish(f"failed/{rank}", {"arrival": barrier.count("reports"), "words": asdict(report)})

    return Reporter(None if runs_local_workers else folder.error_of(rank), rank, publish)


def _await_rank0_result(barrier: ProcessBarrier) -> dict[str, Any]:
    message = barrier.read_any(["result", "failed/0"], within_s=_SHUTDOWN_GRACE_S)
    if "failed/0" in message:
        raise barrier.peer_error(report_from_json(message["failed/0"]["words"]))
    result: dict[str, Any] = message.get("result", {"status": "finished"})
    return result


def _record(barrier: ProcessBarrier, folder: RunFolder, failure: TrainkitError, confirm: Callable[[], None]) -> None:
    """Write the failure to result.json, if the run folder is still this group's, and report it to the other ranks."""
    with contextlib.suppress(TrainkitError):  # another group owns the folder now: do not write to it
        confirm()
        kept = folder.read_result() or skipped_in(folder.checkpoints)
        with contextlib.suppress(OSError):  # the error itself is printed on the terminal
            folder.write_result({**kept, "status": "failed", "reason": str(failure)})
    with contextlib.suppress(RuntimeError):
        barrier.publish("reported", first_line(failure))


def _follower_error(
    barrier: ProcessBarrier, folder: RunFolder | None, report: ErrorReport, processes: _Processes
) -> TrainkitError:
    """Return the error of a rank above 0: one line if rank 0 explains the failure, else the full explanation."""
    reported = barrier.read_any(["reported"], within_s=_GRACE_AFTER_LOSS_S + 1.0)
    if reported:
        code = report.exit_code if report.is_permanent else 1
        return PeerError(f"rank {report.rank} ends: {reported['reported']}", exit_code=code)
    return _first_failure(barrier, folder, report, processes)


def _first_failure(
    barrier: ProcessBarrier, folder: RunFolder | None, report: ErrorReport, processes: _Processes
) -> TrainkitError:
    """Return the failure that caused the others, from all error reports; ranks without one are gone or hang."""
    others = {rank: f"failed/{rank}" for rank in barrier.ranks if rank != report.rank}
    reports, arrivals = {report.rank: report}, {report.rank: len(barrier.ranks)}
    deadline = time.monotonic() + (_GRACE_AFTER_LOSS_S if report.is_secondary else _GRACE_S)
    while len(reports) <= len(others) and (left := deadline - time.monotonic()) > 0:
        received = barrier.read_any([key for rank, key in others.items() if rank not in reports], within_s=left)
        if not received:
            break
        for message in received.values():
            found = report_from_json(message["words"])
            reports[found.rank], arrivals[found.rank] = found, message["arrival"]
        if any(not found.is_secondary for found in reports.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    own = barrier.read_any([f"failed/{report.rank}"], within_s=0.0)
    arrivals.update((report.rank, message["arrival"]) for message in own.values())
    if folder is None:  # every process has already found the first failure of its own ranks
        order = {
            rank: (one.is_secondary, -1 if one.step is None else one.step, arrivals[rank])
            for rank, one in reports.items()
        }
        return reports[min(reports, key=lambda rank: order[rank])].error()
    silent = [rank for rank in others if rank not in reports]
    evidence = _evidence(folder, {rank: processes[rank] for rank in silent})
    if silent and all(one.is_secondary for one in reports.values()):  # even if they left error reports in the folder:
        return unresponsive_rank(folder, silent, evidence).error()  # the host that reads them lost its connection to us
    exits = [
        ProcessExit(attempt=0, rank=rank, code=reports[rank].exit_code)
        for rank in sorted(reports, key=arrivals.__getitem__)
    ]
    return root_cause(folder, exits, silent, evidence).error()


def _own_process() -> dict[str, Any]:
    return {**asdict(ProcessId.of(os.getpid())), "at": host_id(), "host": socket.gethostname()}


def _evidence(folder: RunFolder, processes: _Processes) -> ProcessEvidence:
    """Return the states of processes of ranks without a reporter, as far as this process can see them: on its own
    host.
    """
    here = {
        rank: ProcessId(found["pid"], found["started"]) for rank, found in processes.items() if found["at"] == host_id()
    }
    away = {rank: f"pid {found['pid']} on {found['host']}" for rank, found in processes.items()}
    return ProcessEvidence(folder, lambda: here, away=away)
