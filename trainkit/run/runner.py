"""Train a model from a checked config and write its run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trainkit.cluster.local import launch_environment_of
from trainkit.cluster.tasks import Identity
from trainkit.config.composition import Composition
from trainkit.config.identity import changed_keys
from trainkit.errors import ConfigError, refuse
from trainkit.files import reporting
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.self_watch import BeatCounter, SelfWatch
from trainkit.run.begin import Agreement, BegunRun, Job, Result, RunRequest, begun
from trainkit.run.planning.plan import ChooseWorkers, plan_to_environ, refuse_launch
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.record import RunRecord, record_settings
from trainkit.run.signals import StopFlag
from trainkit.run.task import TaskRun


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
        request = RunRequest(
            cfg=cfg, run_dir=None if run_dir is None else Path(run_dir), notes=composition.notes, launch=launch,
            is_given=composition.is_given, choose_workers=choose_workers,
        )  # fmt: skip
        return train(request, job)
    except ConfigError as error:
        raise composition.with_origins(error) from error


def train(request: RunRequest, job: Job | None = None) -> dict[str, Any]:
    """Train, in this process or in as many processes as the strategy needs.

    Args:
        request: the run.
        job: wraps the call of the training once its folder exists, for example in the job context of Hydra.

    Returns:
        Content of result.json, and `folder`; on a rank above 0 of an external launch, its status and reason.

    Raises:
        ConfigError: this combination of settings is invalid; nothing was written.
        TrainkitError: the training failed; result.json records it, and the last checkpoint stays.
    """
    with reporting(request.location):
        if request.launch is None:
            with begun(request, Agreement()) as begun_run, begun_run.recorded() as record:
                return _train(begun_run, record, job)
        refuse_launch(request.cfg, request.launch)
        from trainkit.run.rendezvous.join import train_external  # noqa: PLC0415 - most runs have no external launch

        return train_external(request, request.launch, job)


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
def opened(request: RunRequest) -> Iterator[TaskRun]:
    """Begin a run, and give the task of this process, which the block trains in its own loop.

    Raises:
        ConfigError: as in `train`.
        TrainkitError: the training failed.
    """
    launch = request.launch
    with reporting(request.location):
        if launch is None:
            begin = begun(request, Agreement())
            with begin as begun_run, begun_run.recorded() as record, _only_task(begun_run, record) as task:
                yield task
            return
        refuse_launch(request.cfg, launch)
        from trainkit.run.rendezvous.join import announce, joined  # noqa: PLC0415 - most runs have no external launch

        announce(launch)
        with joined(request, launch) as group:
            with group.recorded(), group.ending() as ending, group.task(ending.report) as task:
                yield task
                ending.finish(task.result)
            task.receive(ending.result)
            group.end(ending.result or {})
