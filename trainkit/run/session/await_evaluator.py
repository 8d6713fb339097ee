"""End a run with an evaluator: its result waits a bounded time until the last checkpoint is evaluated.

rank 0       leaves the group, marks the training as ended (`live/trained`), waits, and then writes result.json
evaluator    evaluates the remaining checkpoints, writes `live/evaluated.json`, and ends supervisor   writes
`live/evaluated.json` if it gives up on the evaluator

All communication goes through the run folder, so that supervisor, cluster spec and TF_CONFIG runs end in the same way.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

from trainkit.cluster.tasks import Identity
from trainkit.errors import ConfigError, UnreadableError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.error_report import read_error_report
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.session.async_evaluator import evaluate_checkpoints, evaluated_so_far
from trainkit.run.session.evaluator_end import EvaluatorEnd, report_end, reported_end
from trainkit.run.session.session import TaskSession
from trainkit.run.signals import REASONS
from trainkit.strategies.base import PhaseListener

_NICENESS: Final = 5
"""`nice` increment of the evaluator on a CPU that it shares with the training."""
_POLL_S: Final = 0.2
_SILENT_S: Final = 300.0
"""Seconds without a heartbeat or result after which an unsupervised evaluator counts as lost."""
_FAILED_S: Final = 30.0
"""Seconds that a launcher has to restart an evaluator that has reported an error."""
_LOCKED_S: Final = 10.0
"""Seconds that the command of the run may still hold the lock of its folder."""


def evaluate_all(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,
    *,
    requested: Callable[[], str | None],
    on_phase: PhaseListener,
) -> None:
    """Run the evaluator task with a lower CPU priority than the training."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    folder.error_of(identity.task.rank).unlink(missing_ok=True)  # of an earlier start of this task
    if evaluate_checkpoints(plan, identity, folder, requested=requested, on_phase=on_phase):
        report_end(folder, EvaluatorEnd(status="finished"))
        if folder.read_result() is not None:  # rank 0 no longer waited
            bring_up_to_date(folder)


def findings_of(
    session: TaskSession, folder: RunFolder, *, failed: bool, requested: Callable[[], str | None]
) -> dict[str, Any]:
    """Wait for the evaluator; return the entries of the result about it and about the best checkpoint. For rank 0.

    A training that failed or was asked to stop does not wait: the remaining checkpoints are evaluated when it is
    resumed.
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
    return {**folder.best_and_last(), "evaluator": describe(folder, end)}


def await_evaluator(
    folder: RunFolder,
    rank: int,
    *,
    limit_s: float,
    requested: Callable[[], str | None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> EvaluatorEnd:
    """Mark the training as ended, and wait until the evaluator has evaluated the last checkpoint; for rank 0."""
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
        report = read_error_report(folder.error_of(rank))
        silent_s = alive.unchanged_s((size, read_heartbeat(folder.heartbeat_of(rank)), report is not None))
        if report is not None and silent_s > _FAILED_S:
            return EvaluatorEnd(status="failed", reason=f"{report.kinds[0]}: {report.summary}")
        if silent_s > _SILENT_S:
            return EvaluatorEnd(status="failed", reason=f"it sent no heartbeat for {_SILENT_S:g} s")
        sleep(_POLL_S)


class _Watch:
    """Seconds since a value last changed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since, self._value = clock, clock(), None

    def unchanged_s(self, value: Any) -> float:
        if value != self._value:
            self._since, self._value = self._clock(), value
        return self._clock() - self._since


def describe(folder: RunFolder, end: EvaluatorEnd) -> dict[str, Any]:
    """Return the entry of result.json about the evaluator.

    An evaluator that was stopped after evaluating every checkpoint counts as finished.
    """
    try:
        evaluated, left = evaluated_so_far(folder)
    except UnreadableError as error:
        return {"status": "failed", "reason": str(error), "evaluated": 0, "not_evaluated": []}
    if end.status == "stopped" and not left:
        end = EvaluatorEnd(status="finished")
    return {"status": end.status, "reason": end.reason, "evaluated": evaluated, "not_evaluated": left}


def bring_up_to_date(folder: RunFolder) -> bool:
    """Update a result that was written before the evaluator had finished; return whether that was done.

    A run that continues in the folder is not touched: it writes its own result.
    """
    deadline = time.monotonic() + _LOCKED_S
    while True:
        with contextlib.suppress(ConfigError), folder.lock():
            result = folder.read_result()
            if result is not None and result.get("status") != "resized":
                found = describe(folder, EvaluatorEnd(status="finished"))
                folder.write_result({**result, **folder.best_and_last(), "evaluator": found})
            return result is not None
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
