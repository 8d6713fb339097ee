"""Training in a launch: the processes that something else started meet, agree, and train in one run folder.

every process    composes and checks its own config
all meet         at the store of the launch; who is missing is named
all compare      the hash of their configs: one that differs is refused, and nothing is written
rank 0           finds where to begin; all plan it
rank 0           makes, locks and marks the one run folder; all look whether they see it
all train        rank 0 at the terminal, the others into logs/rank_N.log
late ones join   where the others need not wait for them (`trainkit.run.rendezvous.late_join`)
all end          with one exit code
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.schema import RunConfig
from trainkit.config.secrets.secrets import redacted
from trainkit.errors import ConfigError
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.metadata import own_cores, threads_of
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_record import recorded_run
from trainkit.run.hang_detection.limits import TimeLimits
from trainkit.run.planning.cut_notes import coupling_of, cut_notes
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.model_notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.setup import configure_network, identity_for, redirect_output
from trainkit.run.process.signals import StopFlag
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.run.rendezvous.consistency import check_same_config, check_same_plan
from trainkit.run.rendezvous.late_join import job_token, join_running_job, late_joining_ranks, publish_join_info
from trainkit.run.rendezvous.local_workers import LocalWorkerGroup
from trainkit.run.rendezvous.relaunch import (
    ENDED,
    clear_run_folder,
    note_restart_of,
    record_run_folder,
    resume_point_of_launch,
)
from trainkit.run.rendezvous.shutdown import finish_together
from trainkit.run.resume import ResumePoint
from trainkit.run.runner import Job, Result, begin_folder, new_folder, refuse_lack_of_room, resumed_from, run_task
from trainkit.storage import reporting
from trainkit.trainer import failpoints

__all__ = ["train_external"]

_LOCK_PATIENCE_S: Final = 10.0
"""How long the group before this one may take to die, where its launcher has started another in its place."""


def train_external(
    cfg: RunConfig, launch: LaunchEnvironment, *, run_dir: Path | None, notes: Sequence[str], job: Job | None
) -> dict[str, Any]:
    """Train as one process of a launch; arguments and result as of `trainkit.run.runner.train`.

    Raises:
        ConfigError: what is wrong with this combination, or processes that were started differently.
        HangError: a process did not come.
        PeerError: another process failed.
    """
    configure_network(launch)
    late = late_joining_ranks(cfg, launch)
    if launch.rank in late:
        return join_running_job(cfg, launch)
    if launch.rank == 0:
        print(launch.line(), file=sys.stderr, flush=True)  # noqa: T201 - the terminal is where it is read
    ranks = [rank for rank in range(launch.num_ranks) if rank not in late]
    with ProcessBarrier(launch, timeout_s=cfg.supervisor.join_timeout_s, ranks=ranks) as meeting, ExitStack() as stack:
        check_same_config(meeting, cfg)
        if "OMP_NUM_THREADS" not in os.environ:
            places = meeting.all_gather_object({"host": socket.gethostname(), "cores": own_cores()})
            torch.set_num_threads(threads_of(places[ranks.index(launch.rank)], places))
        start = _agree_on_start(meeting, cfg, run_dir)
        plan = meeting.run_everywhere(lambda: make_plan(start.cfg, launch=launch))
        if not plan.auxiliary_ranks:
            check_same_plan(meeting, plan)
        model = meta_model(plan)
        found = model_notes(plan, model)
        if launch.rank == 0:  # it writes the notes, and the others wait for it
            found += cut_notes(plan, lambda: coupling_of(plan, model))
        folder, fence = _agree_on_folder(meeting, stack, start, plan, run_dir, notes=[*notes, *found])
        resolved = resumed_from(plan.cfg, start.checkpoints)
        token = job_token(meeting) if plan.auxiliary_ranks else ""
        if late and launch.rank == 0:
            publish_join_info(meeting, cfg, plan.cfg.batch, folder=folder, fence=fence, token=token)

        share = len(plan.tasks) // launch.num_ranks

        def run(report: Reporter) -> Result:
            if share > 1:
                return _local_worker_group(meeting, plan, share, fence, redacted(resolved.to_dict())[1]).run(folder)
            identity = identity_for(launch, plan, store=meeting.address, prefix=meeting.prefix, token=token)
            failpoints.reload({**os.environ, **identity.to_environ()})
            with StopFlag() as stop:
                return run_task(resolved, identity, folder, stop=stop, plan=plan, confirm=fence.check, report=report)

        if launch.rank > 0:
            with redirect_output(folder.log_of(launch.rank)):
                result = finish_together(meeting, folder, run, confirm=fence.check, runs_local_workers=share > 1)
            return {**result, "folder": str(folder.path)}

        def part() -> Result:
            return finish_together(meeting, folder, run, confirm=fence.check, runs_local_workers=share > 1)

        with recorded_run(folder, confirm=fence.check) as record:
            record.log.write([launch.line()])  # printed before there was a folder
            record.follow_pulse()
            done = (part() if job is None else job(folder.path, part)) or {}
        if done.get("status") in ENDED:
            clear_run_folder(plan.cfg, folder, meeting)
        return {**done, "folder": str(folder.path)}


def _agree_on_start(meeting: ProcessBarrier, cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
    """Where to begin, found by rank 0: it alone looks at folders, which may look otherwise elsewhere."""
    found: list[ResumePoint] = []

    def find() -> dict[str, Any]:
        found.append(resume_point_of_launch(cfg, run_dir, meeting))
        (start,) = found
        batch = start.cfg.batch
        places = {"folder": None if start.folder is None else start.folder.path, "checkpoints": start.checkpoints}
        return {
            "batch": [batch.global_size, batch.micro_size, batch.accumulation],
            **{name: None if path is None else str(path.absolute()) for name, path in places.items()},
        }

    told = meeting.run_on_rank0_and_broadcast(find)
    if found:
        return found[0]
    global_size, micro_size, accumulation = told["batch"]
    batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=accumulation)
    return ResumePoint(
        cfg=replace(cfg, batch=batch),
        folder=RunFolder(Path(told["folder"])) if told["folder"] else None,
        checkpoints=Path(told["checkpoints"]) if told["checkpoints"] else None,
    )


def _agree_on_folder(
    meeting: ProcessBarrier,
    stack: ExitStack,
    start: ResumePoint,
    plan: RunPlan,
    run_dir: Path | None,
    *,
    notes: Sequence[str],
) -> tuple[RunFolder, FencingToken]:
    """The one run folder: made, locked and marked by rank 0, seen by all."""
    fences: list[FencingToken] = []

    def begin() -> dict[str, str]:
        refuse_lack_of_room(plan, meta_model(plan), start.folder, run_dir)
        with reporting(Path("outputs") if run_dir is None else run_dir):
            return made()

    def made() -> dict[str, str]:
        folder = start.folder or new_folder(plan.cfg, run_dir)
        stack.enter_context(_lock(folder, patient=start.folder is not None))
        folder.take()
        fences.append(FencingToken.acquire(folder))
        if start.relaunched:
            note_restart_of(folder, meeting)
        begin_folder(folder, plan, start, notes=notes)
        stack.callback(folder.give_up_reserve)
        record_run_folder(plan.cfg, folder, meeting)
        return {"path": str(folder.path.absolute()), "token": fences[0].token}

    told = meeting.run_on_rank0_and_broadcast(begin)
    folder = RunFolder(Path(told["path"]))
    try:
        fence = meeting.run_everywhere(lambda: FencingToken.verify(folder, told["token"]))
    except ConfigError:
        if meeting.launch.rank == 0 and start.folder is None:
            folder.discard()
        raise
    return folder, fence


@contextlib.contextmanager
def _lock(folder: RunFolder, *, patient: bool) -> Iterator[int]:
    deadline = time.monotonic() + (_LOCK_PATIENCE_S if patient else 0.0)
    with ExitStack() as stack:
        while True:
            try:
                descriptor = stack.enter_context(folder.lock())
                break
            except ConfigError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)
        yield descriptor


def _local_worker_group(
    meeting: ProcessBarrier, plan: RunPlan, share: int, fence: FencingToken, secrets: Mapping[str, Any]
) -> LocalWorkerGroup:
    """The ranks of this process, where it stands for a host of several devices."""
    first = meeting.launch.rank * share
    return LocalWorkerGroup(
        launch=meeting.launch,
        tasks=plan.tasks[first : first + share],
        num_ranks=len(plan.tasks),
        store=meeting.address,
        prefix=f"{meeting.prefix}/group",
        token=fence.token,
        secrets=secrets,
        limits=TimeLimits.of(plan.cfg.supervisor),
    )
