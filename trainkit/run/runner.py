"""Train a model from a checked config and write its run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.local import launch_environment_of
from trainkit.cluster.tasks import Identity
from trainkit.config.composition import Composition
from trainkit.config.identity import changed_keys
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, refuse
from trainkit.files import reporting
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.self_watch import BeatCounter, SelfWatch
from trainkit.run.begin import (
    Agreement,
    BegunRun,
    CheckStart,
    Job,
    Result,
    begun,
    refuse_own_loss,
)
from trainkit.run.planning.notes import is_never_given
from trainkit.run.planning.plan import ChooseWorkers, plan_to_environ, refuse_launch
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.record import RunRecord, record_settings, recorded_run
from trainkit.run.signals import StopFlag
from trainkit.run.task import TaskRun
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
    from trainkit.config.check.rules import unused_keys_with_classes  # noqa: PLC0415 - imports the targets
    from trainkit.config.compose.jobs import run_job  # noqa: PLC0415 - Hydra only where one trains

    def job(folder: Path, task: Callable[[], Result]) -> Result:
        """Run a training as a Hydra job: `.hydra/`, loggers, callbacks, environment; no secrets."""
        record_settings(folder, changed_keys(composition))
        with kept_in(folder):
            return run_job(composition, folder, task)

    if run_dir is None and composition.run_dir_given:
        run_dir = composition.run_dir
    try:
        cfg = composition.cfg
        launch = launch_environment_of(cfg)
        refuse(unused_keys_with_classes(composition, None if launch is None else launch.kind))
        return train(
            cfg,
            run_dir=None if run_dir is None else Path(run_dir),
            notes=composition.notes,
            is_given=composition.is_given,
            job=job,
            launch=launch,
            choose_workers=choose_workers,
        )
    except ConfigError as error:
        raise composition.with_origins(error) from error


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
            begin = begun(
                cfg,
                Agreement(),
                run_dir=run_dir,
                notes=notes,
                is_given=is_given,
                check=refuse_own_loss,
                choose_workers=choose_workers,
            )
            with begin as begun_run, _recorded(begun_run) as record:
                return _train(begun_run, record, job)
        refuse_launch(cfg, launch)
        from trainkit.run.rendezvous.join import train_external  # noqa: PLC0415 - most runs have no external launch

        return train_external(cfg, launch, run_dir=run_dir, notes=notes, job=job, is_given=is_given)


def _train(begun_run: BegunRun, record: RunRecord, job: Job | None) -> dict[str, Any]:
    """Train a run that has begun."""
    plan, folder, cfg = begun_run.plan, begun_run.folder, begun_run.plan.cfg

    def run() -> Result:
        if plan.backend is not None:
            from trainkit.run.backends.engine import run_on  # noqa: PLC0415 - most runs have no process backend

            return run_on(plan.backend, plan, folder)
        pass_fds = () if begun_run.lock is None else (begun_run.lock,)
        if plan.debugged_rank is not None:
            from trainkit.run.launch.debug import debug  # noqa: PLC0415 - most runs are not debugged

            return debug(plan.debugged_rank, plan, begun_run.resolved, folder, pass_fds=pass_fds)
        if len(plan.tasks) == 1:
            with _only_task(begun_run, record) as task:
                return task.run()
        from trainkit.run.agent.agent import AgentSettings  # noqa: PLC0415 - one device needs none
        from trainkit.run.agent.supervisor import supervise  # noqa: PLC0415 - the same

        settings = AgentSettings(
            max_restarts=cfg.supervisor.max_restarts,
            min_replicas=cfg.elastic.min_replicas,
            ranks_a_replica=plan.components.strategy.facts_in(plan.context).ranks_a_replica,
            retry_s=cfg.elastic.retry_s,
            limits=TimeLimits.of(cfg.supervisor),
            pass_fds=pass_fds,
            environ=plan_to_environ(plan),
            auxiliary_ranks=plan.auxiliary_ranks,
            replaceable=plan.replaceable,
        )
        return supervise(folder.resolved, plan.tasks, settings, folder=folder)

    result = run() if job is None else job(folder.path, run)
    return {**(result or {}), "folder": str(folder.path)}


@contextmanager
def _recorded(begun_run: BegunRun) -> Iterator[RunRecord]:
    """Record the output and the status of a run that this process began alone."""
    plan, folder = begun_run.plan, begun_run.folder
    with ended_hooks(plan.cfg, folder.path, folder.read_result), recorded_run(folder) as record:
        record.status.aim_at(plan.known_last_step)
        if not plan.is_measurement:
            record.page.follow(begun_run.resolved)
        record.follow_heartbeat()
        yield record


@contextmanager
def _only_task(begun_run: BegunRun, record: RunRecord) -> Iterator[TaskRun]:
    """Give the only task of a run; stop signals and hangs are caught inside."""
    identity = Identity.solo(begun_run.plan.tasks[0].device)
    beats = BeatCounter(beats_of(identity, begun_run.folder))
    limits = TimeLimits.of(begun_run.plan.cfg.supervisor)
    with (
        StopFlag() as stop,
        SelfWatch(limits, begun_run.folder, read=lambda _rank: beats.count(), requested=lambda: stop.requested),
    ):
        yield TaskRun(
            cfg=begun_run.resolved,
            identity=identity,
            folder=begun_run.folder,
            stop=stop,
            plan=begun_run.plan,
            follow=record.status.follow,
            beats=beats,
        )


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
            begin = begun(cfg, Agreement(), run_dir=run_dir, notes=notes, is_given=is_given, check=check)
            with begin as begun_run, _recorded(begun_run) as record, _only_task(begun_run, record) as task:
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
