"""Run a job in this process, or in as many processes as its strategy needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.tasks import Identity
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.begin import write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.inference.job import Job, refuse_misfits
from trainkit.run.inference.request import VARIABLE
from trainkit.run.inference.task import JobTask
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.signals import StopFlag
from trainkit.strategies.base import ignore_phase

_KEPT: Final = "The finished rows are kept: the same command continues."


def run_job(job: Job, folder: Path, *, log: Callable[[str], None]) -> dict[str, Any]:
    """Run a job; its folder exists and holds nothing but parts of this job.

    Args:
        job: the prepared job.
        folder: folder for files of the processes and parts of a prediction.
        log: logs lines of progress.

    Returns:
        The result of rank 0: its `status` is `finished`, or the reason why it was stopped.

    Raises:
        TrainkitError: a process failed.
    """
    refuse_misfits(job)
    if len(job.tasks) == 1:
        identity = Identity.solo(job.tasks[0].device)
        with StopFlag() as stop:
            task = JobTask(
                job=job,
                identity=identity,
                requested=lambda: stop.requested,
                on_phase=beats_of(identity, RunFolder(folder)) or ignore_phase,
                log=log,
            )
            return task.run() or {}
    from trainkit.run.agent.agent import AgentSettings  # noqa: PLC0415 - one device needs none
    from trainkit.run.agent.supervisor import supervise  # noqa: PLC0415 - the same

    place = RunFolder(folder)
    place.take()
    write_resolved(place, replace(job.cfg, resume=None))
    job.request.write(folder)
    place.begin()
    settings = AgentSettings(
        max_restarts=0,
        environ={VARIABLE: "1"},
        note_without_checkpoint=_KEPT if job.request.verb == "predict" else "",
        limits=TimeLimits.of(job.cfg.supervisor),
        auxiliary_ranks=[task.rank for task in job.tasks if not job.strategy.runs_loop(task)],
        replaceable=[task.rank for task in job.tasks if job.strategy.restarts_alone(task)],
    )
    try:
        return supervise(place.resolved, job.tasks, settings, folder=place)
    finally:
        place.release_reserve()
