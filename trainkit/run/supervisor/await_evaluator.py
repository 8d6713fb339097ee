"""How a run with an evaluator ends: its result waits until the last checkpoint is evaluated, for a bounded time.

rank 0       leaves the group, marks the training as ended (`live/trained`), waits, and then writes result.json
evaluator    evaluates what is left, writes `live/evaluated.json`, and ends
supervisor   writes `live/evaluated.json` where it gives the evaluator up

Everything goes through the run folder: a supervisor, a cluster spec and TF_CONFIG end a run in the same way.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.errors import ConfigError, UnreadableError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.error_report import read_error_report
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.process.signals import REASONS
from trainkit.run.session.async_evaluator import evaluate_checkpoints, evaluated_so_far
from trainkit.run.session.evaluator_end import EvaluatorEnd, report_end, reported_end
from trainkit.run.session.outcome import best_and_last
from trainkit.run.session.session import TaskSession

__all__ = ["await_evaluator", "bring_up_to_date", "describe", "evaluate_all", "findings_of"]

_NICENESS: Final = 5
"""How far an evaluator stands back on a CPU that it shares with the training."""
_LOOK_S: Final = 0.2
_SILENT_S: Final = 300.0
"""Seconds without any sign of life after which an evaluator that nobody supervises counts as gone."""
_FAILED_S: Final = 30.0
"""Seconds that a launcher has to start an evaluator again that has reported an error."""
_LOCKED_S: Final = 10.0
"""Seconds that the run's own command may still hold its folder."""


def evaluate_all(plan: RunPlan, identity: Identity, folder: RunFolder, **hooks: Any) -> None:
    """Do the part of the evaluator, giving way to the training on the CPU, where they share one."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    folder.error_of(identity.task.rank).unlink(missing_ok=True)  # of an earlier life
    if evaluate_checkpoints(plan, identity, folder, **hooks):
        report_end(folder, EvaluatorEnd(status="finished"))
        if folder.read_result() is not None:  # which did not wait any longer
            bring_up_to_date(folder)


def findings_of(
    session: TaskSession, folder: RunFolder, *, failed: bool, requested: Callable[[], str | None]
) -> dict[str, Any]:
    """Wait for the evaluator; return what the result says of it and of the best checkpoint. For rank 0.

    A training that failed or was asked to stop does not wait: what is left is evaluated when it is resumed.

    Args:
        session: the training, which has ended and left its group.
        folder: the run folder.
        failed: whether it failed.
        requested: why this process was asked to stop, or None.
    """
    if failed:
        end = EvaluatorEnd(status="stopped", reason="the training failed")
    elif session.run.stop_reason in REASONS:
        end = EvaluatorEnd(status="stopped", reason="the run was asked to end")
    else:
        session.rest()
        rank = next(task.rank for task in session.plan.tasks if task.is_evaluator)
        limit_s = session.cfg.supervisor.evaluator_timeout_s
        end = await_evaluator(folder, rank, limit_s=limit_s, requested=requested)
    return {**best_and_last(folder), "evaluator": describe(folder, end)}


def await_evaluator(
    folder: RunFolder,
    rank: int,
    *,
    limit_s: float,
    requested: Callable[[], str | None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> EvaluatorEnd:
    """Mark the training as ended, and wait until the evaluator has evaluated its last checkpoint; for rank 0.

    Args:
        folder: the run folder.
        rank: that of the evaluator.
        limit_s: seconds that it may take for a checkpoint.
        requested: why this process was asked to stop, or None.
        clock: seconds that only rise.
        sleep: waits so many seconds.
    """
    folder.trained.touch()
    evaluated, alive = _Watch(clock), _Watch(clock)
    while True:
        end = reported_end(folder)
        if end is not None:
            return end
        if requested() is not None:
            return EvaluatorEnd(status="stopped", reason="the run was asked to end")
        size = folder.evaluations.stat().st_size if folder.evaluations.is_file() else 0
        if evaluated.unchanged_s(size) > limit_s:
            reason = f"no checkpoint was evaluated in {limit_s:g} s (supervisor.evaluator_timeout_s)"
            return EvaluatorEnd(status="timed out", reason=reason)
        words = read_error_report(folder.error_of(rank))
        silent_s = alive.unchanged_s((size, read_heartbeat(folder.heartbeat_of(rank)), words is not None))
        if words is not None and silent_s > _FAILED_S:
            return EvaluatorEnd(status="failed", reason=f"{words.kinds[0]}: {words.summary}")
        if silent_s > _SILENT_S:
            return EvaluatorEnd(status="failed", reason=f"it gave no sign of life for {_SILENT_S:g} s")
        sleep(_LOOK_S)


class _Watch:
    """Seconds since a value last changed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since, self._value = clock, clock(), None

    def unchanged_s(self, value: Any) -> float:
        if value != self._value:
            self._since, self._value = self._clock(), value
        return self._clock() - self._since


def describe(folder: RunFolder, end: EvaluatorEnd) -> dict[str, Any]:
    """Return what result.json says of the evaluator.

    An evaluator that was stopped when there was nothing left to do has finished.
    """
    try:
        evaluated, left = evaluated_so_far(folder)
    except UnreadableError as error:
        return {"status": "failed", "reason": str(error), "evaluated": 0, "not_evaluated": []}
    if end.status == "stopped" and not left:
        end = EvaluatorEnd(status="finished")
    return {"status": end.status, "reason": end.reason, "evaluated": evaluated, "not_evaluated": left}


def bring_up_to_date(folder: RunFolder) -> bool:
    """Write into a result what an evaluator has found that the result did not wait for; return whether that was done.

    A run that goes on in the folder is left alone: it writes a result of its own.

    Args:
        folder: the run folder, in which the evaluator has nothing left to do.
    """
    deadline = time.monotonic() + _LOCKED_S
    while True:
        with contextlib.suppress(ConfigError), folder.lock():
            result = folder.read_result()
            if result is not None and result.get("status") != "resized":
                found = describe(folder, EvaluatorEnd(status="finished"))
                folder.write_result({**result, **best_and_last(folder), "evaluator": found})
            return result is not None
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
