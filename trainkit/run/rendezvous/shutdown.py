"""How the processes of a launch end: together, with one story of what went wrong.

Nobody watches them here: a rank that fails tells it through the store and the run folder, and the others, whose next
exchange breaks, find out who was first. A launcher may end all as soon as one has ended, so nobody leaves before rank 0
has said what there is to say.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from trainkit.cluster.host import ProcessId, host_id
from trainkit.errors import PeerError, TrainkitError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.skipped import skipped_in
from trainkit.run.hang_detection.process_evidence import ProcessEvidence
from trainkit.run.process.error_report import ErrorReport, Reporter, report_from_json
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.run.supervisor.failure import root_cause, unresponsive_rank

__all__ = ["finish_together"]

_Processes = Mapping[int, Mapping[str, Any]]
"""By rank, what `_own_process` gave there."""
_GRACE_S: Final = 0.2
"""How long others have to say their last words once this rank has failed by itself."""
_GRACE_AFTER_LOSS_S: Final = 3.0
"""The same where it only lost another: who failed first may be busy saying why."""
_FAREWELL_S: Final = 30.0
"""How long a rank that is done waits for rank 0, which still writes the result."""


def finish_together(
    meeting: ProcessBarrier,
    folder: RunFolder,
    run: Callable[[Reporter], dict[str, Any] | None],
    *,
    confirm: Callable[[], None],
    runs_local_workers: bool = False,
) -> dict[str, Any]:
    """Run this process's part of the training, and end it with the others.

    Args:
        meeting: the processes that take part.
        folder: the run folder.
        run: does the part, given what reports an error before this rank leaves the others; returns what result.json
            holds, on rank 0.
        confirm: raises where the folder is another group's by now.
        runs_local_workers: whether this process stands for a host, whose ranks have already written to the folder.

    Returns:
        What result.json holds on rank 0; elsewhere its status and reason.

    Raises:
        TrainkitError: the training failed. On rank 0 the failure that came first, on others a `PeerError`.
    """
    # Learned before a rank can be lost: the store may be lost with it.
    processes = dict(zip(meeting.ranks, meeting.all_gather_object(_own_process()), strict=True))
    report = _reporter(meeting, folder, hosts_ranks=runs_local_workers)
    try:
        result = run(report)
    except (Exception, SystemExit) as error:
        words = report(error)
        if meeting.launch.rank > 0:
            sys.stderr.write("".join(traceback.format_exception(error)))  # its log
            raise _follower_error(meeting, None if runs_local_workers else folder, words, processes) from error
        failure = _first_failure(meeting, None if runs_local_workers else folder, words, processes)
        _record(meeting, folder, failure, confirm)
        raise failure from error
    if meeting.launch.rank > 0:
        return _await_rank0_result(meeting)
    result = result or {}
    meeting.publish("result", {key: result.get(key) for key in ("status", "reason")})
    return result


def _reporter(meeting: ProcessBarrier, folder: RunFolder, *, hosts_ranks: bool) -> Reporter:
    """Return what reports an error of this rank, through the folder and through the store, which counts arrivals."""
    rank = meeting.launch.rank

    def tell(words: ErrorReport) -> None:
        meeting.mark_store_suspect()
        with contextlib.suppress(RuntimeError):
            meeting.publish(f"failed/{rank}", {"arrival": meeting.count("reports"), "words": asdict(words)})

    return Reporter(None if hosts_ranks else folder.error_of(rank), rank, tell)


def _await_rank0_result(meeting: ProcessBarrier) -> dict[str, Any]:
    told = meeting.read_any(["result", "failed/0"], within_s=_FAREWELL_S)
    if "failed/0" in told:
        raise meeting.peer_error(report_from_json(told["failed/0"]["words"]))
    result: dict[str, Any] = told.get("result", {"status": "finished"})
    return result


def _record(meeting: ProcessBarrier, folder: RunFolder, failure: TrainkitError, confirm: Callable[[], None]) -> None:
    """Write the failure to result.json, if the run folder is still this group's, and report it to the other ranks."""
    with contextlib.suppress(TrainkitError):  # fenced off: the folder is not ours to write to
        confirm()
        kept = folder.read_result() or skipped_in(folder.checkpoints)
        with contextlib.suppress(OSError):  # the error itself is on the screen
            folder.write_result({**kept, "status": "failed", "reason": str(failure)})
    with contextlib.suppress(RuntimeError):
        meeting.publish("reported", str(failure).splitlines()[0])


def _follower_error(
    meeting: ProcessBarrier, folder: RunFolder | None, words: ErrorReport, processes: _Processes
) -> TrainkitError:
    """What a rank above 0 says: a line, where rank 0 tells the story; the story, where rank 0 cannot."""
    reported = meeting.read_any(["reported"], within_s=_GRACE_AFTER_LOSS_S + 1.0)
    if reported:
        code = words.exit_code if words.is_permanent else 1
        return PeerError(f"rank {words.rank} ends: {reported['reported']}", exit_code=code)
    return _first_failure(meeting, folder, words, processes)


def _first_failure(
    meeting: ProcessBarrier, folder: RunFolder | None, words: ErrorReport, processes: _Processes
) -> TrainkitError:
    """The failure that caused the others, by what every rank reported; those that reported nothing are gone or hang."""
    others = {rank: f"failed/{rank}" for rank in meeting.ranks if rank != words.rank}
    said, arrivals = {words.rank: words}, {words.rank: len(meeting.ranks)}
    deadline = time.monotonic() + (_GRACE_AFTER_LOSS_S if words.is_secondary else _GRACE_S)
    while len(said) <= len(others) and (left := deadline - time.monotonic()) > 0:
        heard = meeting.read_any([key for rank, key in others.items() if rank not in said], within_s=left)
        if not heard:
            break
        for told in heard.values():
            found = report_from_json(told["words"])
            said[found.rank], arrivals[found.rank] = found, told["arrival"]
        if any(not found.is_secondary for found in said.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    own = meeting.read_any([f"failed/{words.rank}"], within_s=0.0)
    arrivals.update((words.rank, told["arrival"]) for told in own.values())
    if folder is None:  # each has judged its own ranks
        order = {
            rank: (one.is_secondary, -1 if one.step is None else one.step, arrivals[rank]) for rank, one in said.items()
        }
        return said[min(said, key=lambda rank: order[rank])].error()
    silent = [rank for rank in others if rank not in said]
    evidence = _evidence(folder, {rank: processes[rank] for rank in silent})
    if silent and all(one.is_secondary for one in said.values()):  # also where they left words in the folder: who reads
        return unresponsive_rank(
            folder, silent, evidence
        ).error()  # them there cannot be reached, and lost us as we lost them
    exits = [
        ProcessExit(attempt=0, rank=rank, code=said[rank].exit_code) for rank in sorted(said, key=arrivals.__getitem__)
    ]
    return root_cause(folder, exits, silent, evidence).error()


def _own_process() -> dict[str, Any]:
    return {**asdict(ProcessId.of(os.getpid())), "at": host_id(), "host": socket.gethostname()}


def _evidence(folder: RunFolder, processes: _Processes) -> ProcessEvidence:
    """Return what this process can see of ranks that report nothing: of those on its own host, their state."""
    here = {
        rank: ProcessId(found["pid"], found["started"]) for rank, found in processes.items() if found["at"] == host_id()
    }
    away = {rank: f"pid {found['pid']} on {found['host']}" for rank, found in processes.items()}
    return ProcessEvidence(folder, lambda: here, away=away)
