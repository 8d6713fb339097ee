"""Training in a launch: the processes that something else started meet, agree, and train in one run folder.

every process    composes and checks its own config
all meet         at the store of the launch; who is missing is named
all compare      the hash of their configs: one that differs is refused, and nothing is written
rank 0           finds where to begin; all plan it
rank 0           makes, locks and marks the one run folder; all look whether they see it
all train        rank 0 at the terminal, the others into logs/rank_N.log
late ones join   where the others need not wait for them (`trainkit.run.latecomers`)
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

from trainkit.cluster.launch import Launch
from trainkit.config.schema import RunConfig
from trainkit.config.secrets import redacted
from trainkit.engine import failpoints
from trainkit.errors import ConfigError
from trainkit.run.alikeness import refuse_other_configs, refuse_other_plans
from trainkit.run.cut_facts import coupling_of, cut_notes
from trainkit.run.entering import identity_in, into_log, prepare_process
from trainkit.run.environment import own_cores, threads_of
from trainkit.run.fence import Fence
from trainkit.run.folder import RunFolder
from trainkit.run.last_words import Reporter
from trainkit.run.latecomers import join_late, late_ranks, let_in, shared_token
from trainkit.run.launched import ENDED, forget_folder, note_restart_of, remember_folder, start_of_launch
from trainkit.run.limits import TimeLimits
from trainkit.run.local_ranks import LocalRanks
from trainkit.run.meeting import Meeting
from trainkit.run.memory import abstract_model
from trainkit.run.model_facts import model_notes
from trainkit.run.parting import end_together
from trainkit.run.plan import RunPlan, make_plan
from trainkit.run.recording import recorded_run
from trainkit.run.resume import Start
from trainkit.run.runner import Job, Result, begin_folder, new_folder, refuse_lack_of_room, resumed_from, run_task
from trainkit.run.stopping import StopFlag
from trainkit.storage import reporting

__all__ = ["train_launched"]

_LOCK_PATIENCE_S: Final = 10.0
"""How long the group before this one may take to die, where its launcher has started another in its place."""


def train_launched(
    cfg: RunConfig, launch: Launch, *, run_dir: Path | None, notes: Sequence[str], job: Job | None
) -> dict[str, Any]:
    """Train as one process of a launch; arguments and result as of `trainkit.run.runner.train`.

    Raises:
        ConfigError: what is wrong with this combination, or processes that were started differently.
        HangError: a process did not come.
        PeerError: another process failed.
    """
    prepare_process(launch)
    late = late_ranks(cfg, launch)
    if launch.rank in late:
        return join_late(cfg, launch)
    if launch.rank == 0:
        print(launch.line(), file=sys.stderr, flush=True)  # noqa: T201 - the terminal is where it is read
    ranks = [rank for rank in range(launch.num_ranks) if rank not in late]
    with Meeting(launch, timeout_s=cfg.supervisor.join_timeout_s, ranks=ranks) as meeting, ExitStack() as stack:
        refuse_other_configs(meeting, cfg)
        if "OMP_NUM_THREADS" not in os.environ:
            places = meeting.gather({"host": socket.gethostname(), "cores": own_cores()})
            torch.set_num_threads(threads_of(places[ranks.index(launch.rank)], places))
        start = _start(meeting, cfg, run_dir)
        plan = meeting.each(lambda: make_plan(start.cfg, launch=launch))
        if not plan.assistants:
            refuse_other_plans(meeting, plan)
        model = abstract_model(plan)
        found = model_notes(plan, model)
        if launch.rank == 0:  # it writes the notes, and the others wait for it
            found += cut_notes(plan, lambda: coupling_of(plan, model))
        folder, fence = _folder(meeting, stack, start, plan, run_dir, notes=[*notes, *found])
        resolved = resumed_from(plan.cfg, start.checkpoints)
        token = shared_token(meeting) if plan.assistants else ""
        if late and launch.rank == 0:
            let_in(meeting, cfg, plan.cfg.batch, folder=folder, fence=fence, token=token)

        share = len(plan.tasks) // launch.num_ranks

        def run(report: Reporter) -> Result:
            if share > 1:
                return _host(meeting, plan, share, fence, redacted(resolved.to_dict())[1]).run(folder)
            identity = identity_in(launch, plan, store=meeting.address, prefix=meeting.prefix, token=token)
            failpoints.arm({**os.environ, **identity.to_environ()})
            with StopFlag() as stop:
                return run_task(resolved, identity, folder, stop=stop, plan=plan, confirm=fence.check, report=report)

        if launch.rank > 0:
            with into_log(folder.log_of(launch.rank)):
                result = end_together(meeting, folder, run, confirm=fence.check, hosts_ranks=share > 1)
            return {**result, "folder": str(folder.path)}

        def part() -> Result:
            return end_together(meeting, folder, run, confirm=fence.check, hosts_ranks=share > 1)

        with recorded_run(folder, confirm=fence.check) as record:
            record.log.write([launch.line()])  # printed before there was a folder
            record.follow_pulse()
            done = (part() if job is None else job(folder.path, part)) or {}
        if done.get("status") in ENDED:
            forget_folder(plan.cfg, folder, meeting)
        return {**done, "folder": str(folder.path)}


def _start(meeting: Meeting, cfg: RunConfig, run_dir: Path | None) -> Start:
    """Where to begin, found by rank 0: it alone looks at folders, which may look otherwise elsewhere."""
    found: list[Start] = []

    def find() -> dict[str, Any]:
        found.append(start_of_launch(cfg, run_dir, meeting))
        (start,) = found
        batch = start.cfg.batch
        places = {"folder": None if start.folder is None else start.folder.path, "checkpoints": start.checkpoints}
        return {
            "batch": [batch.global_size, batch.micro_size, batch.accumulation],
            **{name: None if path is None else str(path.absolute()) for name, path in places.items()},
        }

    told = meeting.first(find)
    if found:
        return found[0]
    global_size, micro_size, accumulation = told["batch"]
    batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=accumulation)
    return Start(
        cfg=replace(cfg, batch=batch),
        folder=RunFolder(Path(told["folder"])) if told["folder"] else None,
        checkpoints=Path(told["checkpoints"]) if told["checkpoints"] else None,
    )


def _folder(
    meeting: Meeting, stack: ExitStack, start: Start, plan: RunPlan, run_dir: Path | None, *, notes: Sequence[str]
) -> tuple[RunFolder, Fence]:
    """The one run folder: made, locked and marked by rank 0, seen by all."""
    fences: list[Fence] = []

    def begin() -> dict[str, str]:
        refuse_lack_of_room(plan, abstract_model(plan), start.folder, run_dir)
        with reporting(Path("outputs") if run_dir is None else run_dir):
            return made()

    def made() -> dict[str, str]:
        folder = start.folder or new_folder(plan.cfg, run_dir)
        stack.enter_context(_lock(folder, patient=start.folder is not None))
        folder.take()
        fences.append(Fence.put_up(folder))
        if start.relaunched:
            note_restart_of(folder, meeting)
        begin_folder(folder, plan, start, notes=notes)
        stack.callback(folder.give_up_reserve)
        remember_folder(plan.cfg, folder, meeting)
        return {"path": str(folder.path.absolute()), "token": fences[0].token}

    told = meeting.first(begin)
    folder = RunFolder(Path(told["path"]))
    try:
        fence = meeting.each(lambda: Fence.seen(folder, told["token"]))
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


def _host(meeting: Meeting, plan: RunPlan, share: int, fence: Fence, secrets: Mapping[str, Any]) -> LocalRanks:
    """The ranks of this process, where it stands for a host of several devices."""
    first = meeting.launch.rank * share
    return LocalRanks(
        launch=meeting.launch,
        tasks=plan.tasks[first : first + share],
        num_ranks=len(plan.tasks),
        store=meeting.address,
        prefix=f"{meeting.prefix}/group",
        token=fence.token,
        secrets=secrets,
        limits=TimeLimits.of(plan.cfg.supervisor),
    )
