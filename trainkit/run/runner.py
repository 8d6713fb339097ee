"""Train a model from a checked config and write its run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.secrets.secrets import redacted, refuse_to_carry
from trainkit.errors import AbsentFileError, StorageError
from trainkit.numerics.determinism import reproducible_process
from trainkit.reading import read_map
from trainkit.run.folder.metadata import write_environment, write_resolved
from trainkit.run.folder.proof_records import last_proof
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_record import recorded_run
from trainkit.run.hang_detection.compile_events import report_compiling
from trainkit.run.hang_detection.limits import TimeLimits
from trainkit.run.hang_detection.self_watch import BeatCounter, SelfWatch
from trainkit.run.planning.build import build_callbacks
from trainkit.run.planning.cut_notes import coupling_of, cut_notes
from trainkit.run.planning.memory import checkpoint_bytes, meta_model
from trainkit.run.planning.model_notes import model_notes
from trainkit.run.planning.out_of_memory import explain_oom
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.heartbeat import Beats, beats_of
from trainkit.run.process.signals import StopFlag
from trainkit.run.resume import ResumePoint, find_start
from trainkit.run.session.auxiliary import run_auxiliary
from trainkit.run.session.outcome import Report, best_and_last, failure_of, reported, unless_exit
from trainkit.run.session.restore import restore_or_init
from trainkit.run.session.session import TaskSession
from trainkit.run.supervisor.await_evaluator import evaluate_all, findings_of
from trainkit.storage import reporting
from trainkit.strategies.flight_recorder import FlightRecorder
from trainkit.trainer.checkpoint import refuse_small_disk

__all__ = ["Job", "Result", "begin_folder", "new_folder", "refuse_lack_of_room", "resumed_from", "run_task", "train"]

Result = dict[str, Any] | None
"""Content of result.json on rank 0; None on other ranks."""

Job = Callable[[Path, Callable[[], Result]], Result]
"""Calls the training in its folder, for example within the job context that Hydra sets up."""


def train(
    cfg: RunConfig,
    *,
    run_dir: Path | None = None,
    notes: Sequence[str] = (),
    job: Job | None = None,
    launch: LaunchEnvironment | None = None,
) -> dict[str, Any]:
    """Train, in this process or in as many processes as the strategy needs.

    Args:
        cfg: a checked config.
        run_dir: the run folder; None: a new one below `outputs/<name>`.
        notes: additional lines of the startup summary.
        job: wraps the call of the training once its folder exists, for example in the job context of Hydra.
        launch: the external launch that this process belongs to; None: this process starts the others itself.

    Returns:
        Content of result.json, and `folder`; on a rank above 0 of an external launch, its status and reason.

    Raises:
        ConfigError: this combination of settings is invalid; nothing was written.
        TrainkitError: the training failed; result.json records it, and the last checkpoint stays.
    """
    with reporting(Path("outputs") if run_dir is None else run_dir):
        if launch is None:
            return _train(cfg, run_dir=run_dir, notes=notes, job=job)
        from trainkit.run.rendezvous.join import train_external  # noqa: PLC0415 - most runs have no external launch

        return train_external(cfg, launch, run_dir=run_dir, notes=notes, job=job)


def _train(cfg: RunConfig, *, run_dir: Path | None, notes: Sequence[str], job: Job | None) -> dict[str, Any]:
    start = find_start(cfg, run_dir)
    plan = make_plan(start.cfg)
    if plan.engine is not None:
        refuse_to_carry([*redacted(plan.cfg.to_dict())[1]], plan.engine.name, key=f"cluster={plan.engine.name.lower()}")
    model = meta_model(plan)
    refuse_lack_of_room(plan, model, start.folder, run_dir)
    found = [*model_notes(plan, model), *cut_notes(plan, lambda: coupling_of(plan, model))]
    folder = start.folder or new_folder(cfg, run_dir)
    with folder.lock() as lock, recorded_run(folder) as record:
        resolved, secrets = begin_folder(folder, plan, start, notes=[*notes, *found])

        def run() -> Result:
            record.follow_heartbeat()
            if plan.engine is not None:
                from trainkit.run.backends.driver import run_on  # noqa: PLC0415 - most runs have no process backend

                return run_on(plan.engine, plan, folder)
            if len(plan.tasks) == 1:
                identity = Identity.solo(plan.tasks[0].device)
                beats = BeatCounter(beats_of(identity, folder))
                limits = TimeLimits.of(cfg.supervisor)
                with StopFlag() as stop, SelfWatch(limits, folder, read=lambda _rank: beats.count()):
                    return run_task(
                        resolved, identity, folder, stop=stop, plan=plan, follow=record.status.follow, beats=beats
                    )
            from trainkit.run.supervisor.supervisor import supervise  # noqa: PLC0415 - one device needs none

            return supervise(
                folder.resolved,
                plan.tasks,
                folder=folder,
                max_restarts=cfg.supervisor.max_restarts,
                min_replicas=cfg.elastic.min_replicas,
                retry_s=cfg.elastic.retry_s,
                limits=TimeLimits.of(cfg.supervisor),
                pass_fds=(lock,),
                secrets=secrets,
                auxiliary_ranks=plan.auxiliary_ranks,
                replaceable=plan.replaceable,
            )

        try:
            result = run() if job is None else job(folder.path, run)
        finally:
            folder.release_reserve()
    return {**(result or {}), "folder": str(folder.path)}


def new_folder(cfg: RunConfig, run_dir: Path | None) -> RunFolder:
    """Create a run folder that no run has used."""
    return RunFolder.create(Path("outputs"), cfg.name) if run_dir is None else RunFolder.claim(run_dir)


def refuse_lack_of_room(plan: RunPlan, model: nn.Module, folder: RunFolder | None, run_dir: Path | None) -> None:
    """Refuse a run whose checkpoints do not fit on the file system, before anything is written or started.

    Args:
        plan: the run.
        model: from `meta_model`.
        folder: the run folder, if it exists.
        run_dir: the folder to be created; None: below `outputs/<name>`.

    Raises:
        StorageError: there is too little free space.
    """
    settings = plan.cfg.checkpoint
    kept = settings.keep_last + settings.keep_best + int(plan.has_evaluator)
    where = folder.path if folder is not None else run_dir or Path("outputs") / plan.cfg.name
    refuse_small_disk(where, size=checkpoint_bytes(plan, model), kept=kept, steps_left=plan.last_step)


def begin_folder(
    folder: RunFolder, plan: RunPlan, start: ResumePoint, *, notes: Sequence[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Write the initial files of a run folder; the caller holds its lock.

    Returns:
        The config to run, and the secrets, which are not written to any file.
    """
    folder.begin()
    resolved = resumed_from(plan.cfg, start.checkpoints)
    secrets = write_resolved(folder, resolved)
    shown = [*notes, *([start.note] if start.note else [])]
    write_environment(folder, cfg=plan.cfg, fingerprint=fingerprint(plan.cfg), notes=shown)
    return resolved, secrets


def resumed_from(cfg: RunConfig, checkpoints: Path | None) -> RunConfig:
    """Return the config with `resume` set to the checkpoint of another run, if the run starts from one."""
    return cfg if checkpoints is None else replace(cfg, resume=str(checkpoints))


def run_task(
    cfg: RunConfig,
    identity: Identity,
    folder: RunFolder,
    *,
    stop: StopFlag,
    plan: RunPlan | None = None,
    confirm: Callable[[], None] | None = None,
    report: Report | None = None,
    follow: Callable[[Callable[[], int]], None] | None = None,
    beats: BeatCounter | None = None,
) -> dict[str, Any] | None:
    """Run one task of a run in this process.

    Args:
        cfg: the resolved config.
        identity: rank and task of this process.
        folder: the run folder; rank 0 owns it.
        stop: requests that this process stops.
        plan: the plan of `cfg`, if the caller has made it.
        confirm: raises if another worker group owns the folder now; called before anything is written to it.
        report: sends an error to the parent and the other ranks, before this rank leaves the group or closes anything;
            None: there are no others.
        follow: receives a function that returns the current step, once the training can begin.
        beats: counts the heartbeats of a run of one process; None: heartbeats are written to the run folder for other
            processes.

    Returns:
        Content of result.json on rank 0; None on other ranks.

    Raises:
        TrainkitError: the training failed; rank 0 has recorded it in result.json.
    """
    is_owner = identity.task.rank == 0
    begun = time.perf_counter()
    session: TaskSession | None = None

    def step() -> int:
        return -1 if session is None else session.run.state.step

    recorder = FlightRecorder(folder.collectives_of, identity.task.rank, step) if identity.store else nullcontext()
    with reproducible_process(enabled=cfg.numerics.reproducible), recorder:
        try:
            heartbeat = beats or beats_of(identity, folder)
            plan = plan or make_plan(cfg)
            if identity.task.rank in plan.auxiliary_ranks:
                work = evaluate_all if identity.task.is_evaluator else run_auxiliary
                with report_compiling(heartbeat):
                    work(
                        plan,
                        identity,
                        folder,
                        requested=lambda: stop.requested,
                        on_phase=heartbeat or _ignore_heartbeat,
                    )
                return None
            with reporting(folder.path), explain_oom(plan, identity.task, lambda: None):
                session = _open(plan, identity, folder, stop, confirm=confirm, report=report, beats=heartbeat)
        except BaseException as error:
            lost = reported(error, report)
            ending = unless_exit(error, report, None)
            if is_owner:
                with contextlib.suppress(OSError):
                    folder.write_result({"skipped_steps": [], **failure_of(ending, folder, lost=lost)})
            if ending is not error:
                raise ending from error
            raise
        try:
            for one in (follow, None if beats is None else beats.follow):
                if one is not None:
                    one(lambda: session.run.state.step)
            with (
                reporting(folder.path),
                explain_oom(plan, identity.task, lambda: session.run.state.step),
                report_compiling(heartbeat),
            ):
                trained = session.train()
            result = {**trained, "seconds_total": time.perf_counter() - begun, **_checkpoint_paths(folder, plan)}
        except BaseException as error:
            error.add_note(f"rank {identity.task.rank}, step {session.run.state.step}")
            lost = reported(error, report)
            session.save_last(error)
            ending = unless_exit(error, report, session.run.state.step)
            failed = {**session.progress(), **failure_of(ending, folder, lost=lost), **_checkpoint_paths(folder, plan)}
            _close_and_record(session, failed, folder, ending)
            if ending is not error:
                raise ending from error
            raise
        _close_and_record(session, result, folder, requested=lambda: stop.requested)
    return result if is_owner else None


def _ignore_heartbeat(phase: str, step: int) -> None:
    """Ignore a heartbeat, where no process reads it."""


def _close_and_record(
    session: TaskSession,
    result: dict[str, Any],
    folder: RunFolder,
    error: BaseException | None = None,
    requested: Callable[[], str | None] = lambda: None,
) -> None:
    """Leave the process group, write the result, and call `run_end` of the callbacks, except after a second Ctrl-C.

    If the run has already failed, write errors are suppressed here: the error that ended the run is raised instead.
    """
    session.close(failed=error is not None)
    suppressed = () if error is None else (OSError, StorageError)
    with contextlib.suppress(*suppressed):
        if session.run.is_owner:
            session.check_fence()
            if session.plan.has_evaluator:
                result |= findings_of(session, folder, failed=error is not None, requested=requested)
                session.check_fence()
            folder.write_result(result)
    for callback in session.callbacks if not isinstance(error, KeyboardInterrupt) else ():
        with contextlib.suppress(*suppressed):
            callback.run_end(session.run, result)


def _open(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,
    stop: StopFlag,
    *,
    confirm: Callable[[], None] | None,
    report: Report | None,
    beats: Beats | BeatCounter | None,
) -> TaskSession:
    session = TaskSession(
        plan,
        identity=identity,
        folder=folder.path,
        callbacks=build_callbacks(plan.cfg),
        fingerprint=fingerprint(plan.cfg),
        stop_requested=lambda: stop.requested,
        notes=(*_notes(folder), *_lost_replica_note(plan, identity)),
        check_fence=confirm,
        on_phase=beats,
        within_steps=beats is not None and beats.within_steps,
    )
    try:
        restore_or_init(session, folder.checkpoints)
    except BaseException as error:
        reported(error, report)
        session.close(failed=True)
        raise
    return session


def _lost_replica_note(plan: RunPlan, identity: Identity) -> tuple[str, ...]:
    """Return a note about lost replicas, if there are any."""
    planned, present = len(plan.tasks), identity.num_ranks
    return (f"goes on with {present} of {planned} replicas: they share the shards of each step",) * (present < planned)


def _checkpoint_paths(folder: RunFolder, plan: RunPlan) -> dict[str, Any]:
    """Return the checkpoint paths, the resume command, and the last proof of this training on this placement."""
    return {**best_and_last(folder), "resume": folder.resume_command, "proved": last_proof(plan)}


def _notes(folder: RunFolder) -> list[str]:
    try:
        notes: list[str] = read_map(folder.environment, {"notes": list})["notes"]
    except AbsentFileError:  # a rank that was started by hand
        return []
    return [note for note in notes if isinstance(note, str)]
