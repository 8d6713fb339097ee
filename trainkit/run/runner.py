"""Train a model from a checked config and write its run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.local import launch_environment_of
from trainkit.cluster.tasks import Identity
from trainkit.config.composition import Composition
from trainkit.config.identity import changed_keys
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, together
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.self_watch import BeatCounter, SelfWatch
from trainkit.run.begin import (
    CheckStart,
    Job,
    Result,
    begin_folder,
    find_start,
    new_folder,
    refuse_lack_of_room,
    refuse_own_loss,
)
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import coupling_of, cut_notes, is_never_given, model_notes
from trainkit.run.planning.plan import ChooseWorkers, RunPlan, make_plan, plan_to_environ, with_workers
from trainkit.run.planning.tasks import refuse_launch
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.record import RunRecord, record_settings, recorded_run
from trainkit.run.signals import StopFlag
from trainkit.run.task import TaskRun
from trainkit.storage import reporting
from trainkit.trainer.events import ended_hooks


def train_composition(
    composition: Composition,
    *,
    run_dir: str | Path | None = None,
    kept_in: Callable[[Path], AbstractContextManager[Any]] = nullcontext,
    choose_workers: ChooseWorkers | None = None,
) -> dict[str, Any]:
    """Train a checked composition, as a job of Hydra; return the content of `result.json`.

    Args:
        composition: the result of `trainkit.config.check.checked`.
        run_dir: the run folder; None: as in `train`, or `hydra.run.dir` if the composition sets it.
        kept_in: context manager that keeps the source of a session's classes in the run's folder.
        choose_workers: as in `train`.

    Raises:
        ConfigError: as in `train`, with the origin of each key.
        TrainkitError: as in `train`.
    """
    from trainkit.config.check.unused_keys import unused_keys_with_classes  # noqa: PLC0415 - imports the targets

    if run_dir is None and composition.run_dir_given:
        run_dir = composition.run_dir
    try:
        cfg = composition.cfg
        launch = launch_environment_of(cfg)
        if problems := unused_keys_with_classes(composition, None if launch is None else launch.kind):
            raise ConfigError(problems)
        return train(
            cfg,
            run_dir=None if run_dir is None else Path(run_dir),
            notes=composition.notes,
            is_given=composition.is_given,
            job=_hydra_job(composition, kept_in),
            launch=launch,
            choose_workers=choose_workers,
        )
    except ConfigError as error:
        raise composition.with_origins(error) from error


def _hydra_job(composition: Composition, kept_in: Callable[[Path], AbstractContextManager[Any]]) -> Job:
    """Return a function that runs a training as a Hydra job: `.hydra/`, loggers, callbacks, environment; no secrets."""
    from trainkit.config.compose.jobs import run_job  # noqa: PLC0415 - Hydra only where one trains

    def job(folder: Path, task: Callable[[], Result]) -> Result:
        record_settings(folder, changed_keys(composition))
        with kept_in(folder):
            return run_job(composition, folder, task)

    return job


def train(
    cfg: RunConfig,
    *,
    run_dir: Path | None = None,
    notes: Sequence[str] = (),
    job: Job | None = None,
    launch: LaunchEnvironment | None = None,
    is_given: Callable[[str], bool] = is_never_given,
    choose_workers: ChooseWorkers | None = None,
) -> dict[str, Any]:
    """Train, in this process or in as many processes as the strategy needs.

    Args:
        cfg: a checked config.
        run_dir: the run folder; None: a new one below `outputs/<name>`.
        notes: additional lines of the startup summary.
        job: wraps the call of the training once its folder exists, for example in the job context of Hydra.
        launch: the external launch that this process belongs to; None: this process starts the others itself.
        is_given: whether the user set a key; a given key without effect is refused.
        choose_workers: resolves `loader.num_workers=auto`; None: it is refused.

    Returns:
        Content of result.json, and `folder`; on a rank above 0 of an external launch, its status and reason.

    Raises:
        ConfigError: this combination of settings is invalid; nothing was written.
        TrainkitError: the training failed; result.json records it, and the last checkpoint stays.
    """
    with reporting(Path("outputs") if run_dir is None else run_dir):
        if launch is None:
            with _begun(cfg, run_dir=run_dir, notes=notes, is_given=is_given, choose_workers=choose_workers) as begun:
                return _train(begun, job)
        refuse_launch(cfg, launch)
        from trainkit.run.rendezvous.join import train_external  # noqa: PLC0415 - most runs have no external launch

        return train_external(cfg, launch, run_dir=run_dir, notes=notes, job=job, is_given=is_given)


def _train(begun: _BegunRun, job: Job | None) -> dict[str, Any]:
    """Train a run that has begun."""
    plan, folder, cfg = begun.plan, begun.folder, begun.plan.cfg

    def run() -> Result:
        begun.record.follow_heartbeat()
        if plan.backend is not None:
            from trainkit.run.backends.driver import run_on  # noqa: PLC0415 - most runs have no process backend

            return run_on(plan.backend, plan, folder)
        if len(plan.tasks) == 1:
            with begun.task() as task:
                return task.run()
        from trainkit.run.agent.agent import AgentSettings  # noqa: PLC0415 - one device needs none
        from trainkit.run.agent.supervisor import supervise  # noqa: PLC0415 - the same

        settings = AgentSettings(
            max_restarts=cfg.supervisor.max_restarts,
            min_replicas=cfg.elastic.min_replicas,
            retry_s=cfg.elastic.retry_s,
            limits=TimeLimits.of(cfg.supervisor),
            pass_fds=(begun.lock,),
            environ=plan_to_environ(plan),
            auxiliary_ranks=plan.auxiliary_ranks,
            replaceable=plan.replaceable,
        )
        return supervise(folder.resolved, plan.tasks, settings, folder=folder)

    result = run() if job is None else job(folder.path, run)
    return {**(result or {}), "folder": str(folder.path)}


@dataclass(frozen=True, kw_only=True)
class _BegunRun:
    """A run whose folder is locked and has its initial files."""

    plan: RunPlan
    folder: RunFolder
    resolved: RunConfig
    record: RunRecord
    lock: int
    """Descriptor of the lock."""

    @contextmanager
    def task(self) -> Iterator[TaskRun]:
        """Give the only task of the run; stop signals and hangs are caught inside."""
        identity = Identity.solo(self.plan.tasks[0].device)
        beats = BeatCounter(beats_of(identity, self.folder))
        limits = TimeLimits.of(self.plan.cfg.supervisor)
        with (
            StopFlag() as stop,
            SelfWatch(limits, self.folder, read=lambda _rank: beats.count(), requested=lambda: stop.requested),
        ):
            yield TaskRun(
                cfg=self.resolved,
                identity=identity,
                folder=self.folder,
                stop=stop,
                plan=self.plan,
                follow=self.record.status.follow,
                beats=beats,
            )


@contextmanager
def _begun(
    cfg: RunConfig,
    *,
    run_dir: Path | None,
    notes: Sequence[str],
    is_given: Callable[[str], bool],
    check: CheckStart = refuse_own_loss,
    choose_workers: ChooseWorkers | None = None,
) -> Iterator[_BegunRun]:
    """Plan a run, refuse an impossible one, and begin its folder; it is locked and its output recorded inside.

    `check` raises if the loop of this process cannot run a plan; the trainer's own runs every plan, but for a run to
    continue whose steps had a loss of another loop.
    """
    start = find_start(cfg, run_dir)
    plan = make_plan(start.cfg)
    check(start, plan)
    model = meta_model(plan.cfg)
    found = together(lambda: refuse_misfits(plan, model), then=lambda: model_notes(plan, model, is_given))
    refuse_lack_of_room(plan, model, start.folder, run_dir)
    found += cut_notes(plan, lambda: coupling_of(plan, model))
    if plan.cfg.loader.num_workers == "auto":
        plan, note = with_workers(plan, choose_workers)  # keep it last: it takes some seconds
        found.append(note)
    folder = start.folder or new_folder(cfg, run_dir)
    with folder.lock() as lock, ended_hooks(plan.cfg, folder.path, folder.read_result), recorded_run(folder) as record:
        record.status.aim_at(plan.last_step)
        resolved = begin_folder(folder, plan, start, notes=[*notes, *found])
        if not plan.is_measurement:
            record.page.follow(resolved)
        try:
            yield _BegunRun(plan=plan, folder=folder, resolved=resolved, record=record, lock=lock)
        finally:
            folder.release_reserve()


@contextmanager
def opened(
    cfg: RunConfig,
    *,
    run_dir: Path | None,
    notes: Sequence[str],
    launch: LaunchEnvironment | None,
    is_given: Callable[[str], bool],
    check: CheckStart,
) -> Iterator[TaskRun]:
    """Begin a run, and give the task of this process, which the block trains in its own loop.

    Args:
        cfg: as in `train`.
        run_dir: as in `train`.
        notes: as in `train`.
        launch: as in `train`.
        is_given: as in `train`.
        check: raises if a plan has no task for this process to train; nothing was written.

    Raises:
        ConfigError: as in `train`.
        TrainkitError: the training failed.
    """
    with reporting(Path("outputs") if run_dir is None else run_dir):
        if launch is None:
            with _begun(cfg, run_dir=run_dir, notes=notes, is_given=is_given, check=check) as begun:
                begun.record.follow_heartbeat()
                with begun.task() as task:
                    yield task
            return
        refuse_launch(cfg, launch)
        from trainkit.run.rendezvous.join import announce, joined  # noqa: PLC0415 - most runs have no external launch

        announce(launch)
        with joined(cfg, launch, run_dir=run_dir, notes=notes, is_given=is_given, check=check) as group:
            with group.recorded(), group.ending() as ending, group.task(ending.report) as task:
                yield task
                ending.finish(task.result)
            task.receive(ending.result)
            group.end(ending.result or {})
