"""How the processes of a launch end: together, with one story of what went wrong.

Nobody watches them here: a rank that fails tells it through the store and the run folder, and the others, whose next
exchange breaks, find out who was first. A launcher may end all as soon as one has ended, so nobody leaves before rank 0
has said what there is to say.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from trainkit.errors import PeerError, TrainkitError
from trainkit.run.failure import culprit, unanswering
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited
from trainkit.run.last_words import LastWords, last_words, words_from, write_last_words
from trainkit.run.meeting import Meeting
from trainkit.run.skipped import skipped_in

__all__ = ["end_together"]

_GRACE_S: Final = 0.2
"""How long others have to say their last words once this rank has failed by itself."""
_GRACE_AFTER_LOSS_S: Final = 3.0
"""The same where it only lost another: who failed first may be busy saying why."""
_FAREWELL_S: Final = 30.0
"""How long a rank that is done waits for rank 0, which still writes the result."""


def end_together(
    meeting: Meeting,
    folder: RunFolder,
    run: Callable[[], dict[str, Any] | None],
    *,
    confirm: Callable[[], None],
    hosts_ranks: bool = False,
) -> dict[str, Any]:
    """Run this process's part of the training, and end it with the others.

    Args:
        meeting: the processes that take part.
        folder: the run folder.
        run: does the part; returns what result.json holds, on rank 0.
        confirm: raises where the folder is another group's by now.
        hosts_ranks: whether processes stand for hosts, whose ranks have told the folder already.

    Returns:
        What result.json holds on rank 0; elsewhere its status and reason.

    Raises:
        TrainkitError: the training failed. On rank 0 the failure that came first, on others a `PeerError`.
    """
    try:
        result = run()
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise _explained(meeting, folder, error, confirm, hosts_ranks=hosts_ranks) from error
    if meeting.launch.rank > 0:
        return _dismissed(meeting)
    result = result or {}
    meeting.tell("result", {key: result.get(key) for key in ("status", "reason")})
    return result


def _dismissed(meeting: Meeting) -> dict[str, Any]:
    told = meeting.ask(["result", "failed/0"], within_s=_FAREWELL_S)
    if "failed/0" in told:
        raise meeting.peer_error(words_from(told["failed/0"]))
    result: dict[str, Any] = told.get("result", {"status": "finished"})
    return result


def _explained(
    meeting: Meeting, folder: RunFolder, error: Exception, confirm: Callable[[], None], *, hosts_ranks: bool
) -> TrainkitError:
    """The error to end with, once the others have had time to say theirs."""
    meeting.hurry()
    rank = meeting.launch.rank
    words = last_words(rank, error) if hosts_ranks else write_last_words(folder.error_of(rank), rank, error)
    with contextlib.suppress(RuntimeError):
        meeting.tell(f"failed/{rank}", asdict(words))
    if rank > 0:
        sys.stderr.write("".join(traceback.format_exception(error)))  # its log
        return _echo(meeting, None if hosts_ranks else folder, words)
    told = _first_failure(meeting, None if hosts_ranks else folder, words)
    with contextlib.suppress(TrainkitError):  # fenced off: the folder is not ours to write to
        confirm()
        kept = folder.read_result() or skipped_in(folder.checkpoints)
        folder.write_result({**kept, "status": "failed", "reason": str(told)})
    with contextlib.suppress(RuntimeError):
        meeting.tell("reported", str(told).splitlines()[0])
    return told


def _echo(meeting: Meeting, folder: RunFolder | None, words: LastWords) -> TrainkitError:
    """What a rank above 0 says: a line, where rank 0 tells the story; the story, where rank 0 cannot."""
    reported = meeting.ask(["reported"], within_s=_GRACE_AFTER_LOSS_S + 1.0)
    if reported:
        code = words.exit_code if words.final else 1
        return PeerError(f"rank {words.rank} ends: {reported['reported']}", exit_code=code)
    return _first_failure(meeting, folder, words)


def _first_failure(meeting: Meeting, folder: RunFolder | None, words: LastWords) -> TrainkitError:
    """The failure that came first, by what every rank said; those that said nothing are gone or hang."""
    others = {rank: f"failed/{rank}" for rank in meeting.ranks if rank != words.rank}
    said = {words.rank: words}
    deadline = time.monotonic() + (_GRACE_AFTER_LOSS_S if words.aftermath else _GRACE_S)
    while len(said) <= len(others) and (left := deadline - time.monotonic()) > 0:
        heard = meeting.ask([key for rank, key in others.items() if rank not in said], within_s=left)
        if not heard:
            break
        said |= {found.rank: found for found in map(words_from, heard.values())}
        if any(not found.aftermath for found in said.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if folder is None:  # each has judged its own ranks
        return min(said.values(), key=lambda one: (one.aftermath, one.moment)).error()
    silent = [rank for rank in others if rank not in said]
    if silent and all(one.aftermath for one in said.values()):  # also where they left words in the folder: who reads
        return unanswering(folder, silent).error()  # them there cannot be reached, and lost us as we lost them
    exits = [Exited(attempt=0, rank=rank, code=one.exit_code, moment=one.moment) for rank, one in said.items()]
    return culprit(folder, exits, silent).error()
