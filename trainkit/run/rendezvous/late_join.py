"""Tasks of an external launch that may join late or rejoin: workers without state, and the evaluator.

The others begin without them (`trainkit.run.rendezvous.join`). Then the chief publishes the folder, batch and config of
the run in the store, or why it cannot begin, and a task that arrives, early or late, for the first time or again, reads
them. No process waits for a task that leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, HangError, HangupError, PeerError, StoppedError, TerminatedError
from trainkit.files import Kind, expect_map, whole_numbers
from trainkit.run.folder.run_folder import FencingToken, RunFolder
from trainkit.run.folder.run_result import ENDING, RunResult
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.error_report import Reporter, error_report, report_from_json
from trainkit.run.process.setup import announce_log, identity_for, redirect_output
from trainkit.run.rendezvous.barrier import ProcessBarrier, StoreClient, WaitReporter, config_digest, config_mismatches
from trainkit.run.session.auxiliary import training_has_ended
from trainkit.run.signals import Reason, StopFlag, ignore_request, stop_error
from trainkit.run.task import TaskRun
from trainkit.strategies.base import PlanContext, Strategy
from trainkit.trainer import failpoints

_KEY: Final = "trainkit/open"
_JOIN_INFO: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("prefix", "folder", "fence", "token"), str),
    "likeness": dict,
    "batch": list,
    "num_gpus": int,
}
_REFUSAL: Final[Mapping[str, Kind]] = {"prefix": str, "failed": dict}
_POLL_S: Final = 0.2
_TOKEN: Final = "TRAINKIT_TOKEN"  # noqa: S105 - the name of the variable that holds it
_REFUSAL_S: Final = 5.0
"""Seconds for which a chief that cannot begin waits until the late tasks have read why."""
_SHUTDOWN_GRACE_S: Final = 30.0
"""Seconds that a stopped task waits for the chief to write the result."""


def late_joining_ranks(cfg: RunConfig, launch: LaunchEnvironment) -> frozenset[int]:
    """Return the ranks of a launch that the others do not wait for: those that may be started by hand, one by one.

    A launcher starts and ends all of its processes together.

    Raises:
        ConfigError: the strategy cannot be built.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    alone = [task for task in strategy.tasks(PlanContext(launch=launch.training)) if strategy.restarts_alone(task)]
    evaluator = [task for task in launch.tasks if task.is_evaluator]
    return frozenset(task.rank for task in (*alone, *evaluator) if launch.by_hand)


def job_token(barrier: ProcessBarrier) -> str:
    """Return the secret that the tasks of this run share: from the environment, else created by the chief; collective.

    A token that the chief creates goes through the store, where any process that reaches its port can read it.
    """
    made: str = barrier.run_on_rank0_and_broadcast(lambda: token_hex(32))
    return os.environ.get(_TOKEN) or made


@contextlib.contextmanager
def refusing_late_tasks(barrier: ProcessBarrier, late: Collection[int]) -> Iterator[None]:
    """Tell the late tasks, if the run cannot begin, and give them time to read it before the store ends; for rank 0."""
    try:
        yield
    except Exception as error:
        if late and barrier.launch.rank == 0:
            failed = {"prefix": barrier.prefix, "failed": asdict(error_report(0, error))}
            with contextlib.suppress(RuntimeError):  # the store's DistError
                barrier.publish_global(_KEY, json.dumps(failed))
                unread, deadline = {f"refused/{rank}" for rank in late}, time.monotonic() + _REFUSAL_S
                while unread and (left_s := deadline - time.monotonic()) > 0:
                    unread -= barrier.read_any(unread, within_s=left_s).keys()
        raise


def publish_join_info(
    barrier: ProcessBarrier,
    cfg: RunConfig,
    plan: RunPlan,
    *,
    folder: RunFolder,
    fencing_token: FencingToken,
    token: str,
) -> None:
    """Publish the data that late tasks need to join; for rank 0, once there is a run folder.

    Their composed config has to equal this one. The secret of the tasks is not published if the environment provides
    it.
    """
    info = {
        "prefix": barrier.prefix,
        "likeness": config_digest(cfg),
        "batch": [plan.batch.global_size, plan.batch.micro_size],
        "num_gpus": plan.context.num_gpus,
        "folder": str(folder.path.absolute()),
        "fence": fencing_token.token,
        "token": "" if os.environ.get(_TOKEN) else token,
    }
    barrier.publish_global(_KEY, json.dumps(info))


def join_running_job(cfg: RunConfig, launch: LaunchEnvironment) -> dict[str, Any]:
    """Run a task that may join late; arguments as in `train_external`.

    Returns:
        Status and reason of the run.

    Raises:
        ConfigError: it cannot be planned, differs from that of the chief, or sees another folder.
        PeerError: the chief could not begin.
        HangError: the chief did not arrive, or is gone.
        StoppedError, TerminatedError, HangupError: this process was asked to end; the others continue.
    """
    task, datasets = launch.task, None
    if cfg.resume is None and not task.is_evaluator:  # nobody waits for this task: refuse before the chief is there
        datasets = make_plan(cfg, launch=launch).components.datasets
    store = StoreClient(launch)
    waiter = WaitReporter(lambda: launch.place_of(0), timeout_s=cfg.supervisor.join_timeout_s)
    with ExitStack() as stack:
        stack.callback(store.close)
        info = _read_join_info(store, stack, waiter)
        if "failed" in info:
            store.set(f"{info['prefix']}/refused/{launch.rank}", "true")
            report = info["failed"]
            raise PeerError(f"{task} ends with {launch.place_of(0)}: {report.summary}", exit_code=report.exit_code)
        problems = config_mismatches(
            config_digest(cfg), {launch.place_of(0): info["likeness"]}, origin=launch.place_of(launch.rank)
        )
        if problems:
            raise ConfigError(problems)
        global_size, micro_size = info["batch"]
        batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=None)
        num_gpus = info["num_gpus"] if task.is_evaluator else None  # it plans what the others train
        plan = make_plan(replace(cfg, batch=batch), launch=launch, num_gpus=num_gpus, splits=datasets)
        folder = RunFolder(Path(info["folder"]))
        fencing_token = FencingToken.verify(folder, info["fence"])
        identity = identity_for(
            launch,
            plan,
            store=store.address,
            prefix=info["prefix"],
            token=os.environ.get(_TOKEN) or info["token"],
            life=store.add(f"{info['prefix']}/lives/{launch.rank}", 1) - 1,
        )
        failpoints.reload({**os.environ, **identity.to_environ()})
        rank = identity.task.rank
        reporter = Reporter(folder.error_of(rank), rank)
        announce_log(launch, folder.log_of(rank))
        with (
            redirect_output(folder.log_of(rank)),
            StopFlag(ignore_request if identity.task.is_evaluator else _abort_task) as stop,
        ):
            try:
                TaskRun(
                    cfg=plan.cfg,
                    identity=identity,
                    folder=folder,
                    stop=stop,
                    plan=plan,
                    confirm=fencing_token.check,
                    report=reporter,
                ).run()
            except (StoppedError, TerminatedError, HangupError, KeyboardInterrupt):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported with the cause of this task
                _raise_cause(launch, folder, error, reporter)
        if stop.requested:
            raise stop_error(stop.requested, "the others continue.")
        return {**_outcome(folder), "folder": str(folder.path)}


def _read_join_info(store: StoreClient, stack: ExitStack, waiter: WaitReporter) -> dict[str, Any]:
    """Wait for the join information of the chief, and return it."""
    store.open(stack, waiter)
    while True:
        try:
            if store.has(_KEY):
                return _checked(store)
        except RuntimeError:  # the store's DistError: the store of a run that was just ending
            store.open(stack, waiter)
        waiter.wait(_POLL_S)


def _checked(store: StoreClient) -> dict[str, Any]:
    try:
        message = store.message(_KEY)
        if isinstance(message, dict) and "failed" in message:
            refusal = expect_map(message, _REFUSAL)
            return {**refusal, "failed": report_from_json(refusal["failed"])}
        info = expect_map(message, _JOIN_INFO)
        whole_numbers([one for one in info["batch"] if one is not None])
        if len(info["batch"]) != len(("global_size", "micro_size")):
            raise ValueError("its batch is not two numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise store.misfit(_KEY, ValueError(str(error))) from None
    return info


def _abort_task(reason: Reason) -> None:
    """End this task at once: other tasks take over its work."""
    raise stop_error(reason, "asked to end; the others continue.")


def _raise_cause(launch: LaunchEnvironment, folder: RunFolder, error: BaseException, reporter: Reporter) -> None:
    """Raise the error that ended this task, unless the training had ended before."""
    if training_has_ended(folder):
        return
    report = reporter(error)
    sys.stderr.write("".join(traceback.format_exception(error)))  # printed to its log
    if not report.is_secondary:
        raise error
    if not training_has_ended(folder):
        raise HangError(
            f"{launch.place_of(0)} cannot be reached any more, and the run needs it. Start every task again; "
            "resume=auto continues from the last checkpoint."
        ) from error


def _outcome(folder: RunFolder) -> dict[str, Any]:
    deadline = time.monotonic() + _SHUTDOWN_GRACE_S
    while (result := folder.read_result()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return {key: (result or RunResult.of_status("finished").content()).get(key) for key in ENDING}
