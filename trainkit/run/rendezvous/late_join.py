"""Tasks of a launch that may come when they like, and come again: workers that hold nothing, and the evaluator.

The others meet and begin without them (`trainkit.run.rendezvous.join`). Then the chief leaves word in the store, and
whoever comes, early or late, for the first time or again, reads it: which folder, which batch, which config. Nobody
waits for one that leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from trainkit.bounded_json import Kind, expect_map, whole_numbers
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.schema import BatchConfig, RunConfig
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, HangError, HangupError, StoppedError, TerminatedError
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import make_plan
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.setup import identity_for, redirect_output
from trainkit.run.process.signals import Reason, StopFlag, stop_error
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.run.rendezvous.consistency import config_digest, config_mismatches
from trainkit.run.rendezvous.store_client import StoreClient
from trainkit.run.rendezvous.wait import WaitReporter
from trainkit.run.runner import run_task
from trainkit.run.session.async_evaluator import training_has_ended
from trainkit.strategies.base import Strategy
from trainkit.trainer import failpoints

__all__ = ["job_token", "join_running_job", "late_joining_ranks", "publish_join_info"]

_KEY: Final = "trainkit/open"
_WORD: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("prefix", "folder", "fence", "token"), str),
    "likeness": dict,
    "batch": list,
}
_POLL_S: Final = 0.2
_TOKEN: Final = "TRAINKIT_TOKEN"  # noqa: S105 - the name of the variable that holds it
_SHUTDOWN_GRACE_S: Final = 30.0
"""How long a task that was sent home waits for the result, which the chief still writes."""


def late_joining_ranks(cfg: RunConfig, launch: LaunchEnvironment) -> frozenset[int]:
    """The ranks of a launch that the others do not wait for.

    Raises:
        ConfigError: the strategy cannot be built.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    return frozenset(task.rank for task in launch.tasks if task.is_evaluator or strategy.replaces(task))


def job_token(meeting: ProcessBarrier) -> str:
    """What the tasks of this run know: as the environment says, else made by the chief; collective.

    One that the chief makes goes through the store, where whoever reaches its port can read it.
    """
    made: str = meeting.run_on_rank0_and_broadcast(lambda: token_hex(32))
    return os.environ.get(_TOKEN) or made


def publish_join_info(
    meeting: ProcessBarrier, cfg: RunConfig, batch: BatchConfig, *, folder: RunFolder, fence: FencingToken, token: str
) -> None:
    """Leave word for those that may come late; for rank 0, once there is a run folder.

    Args:
        meeting: the processes that have met.
        cfg: the config as it was composed, which theirs has to equal.
        batch: what the run resolved of it.
        folder: the run folder.
        fence: its mark.
        token: what the tasks know; left out where the environment is to say it.
    """
    word = {
        "prefix": meeting.prefix,
        "likeness": config_digest(cfg),
        "batch": [batch.global_size, batch.micro_size],
        "folder": str(folder.path.absolute()),
        "fence": fence.token,
        "token": "" if os.environ.get(_TOKEN) else token,
    }
    meeting.publish_global(_KEY, json.dumps(word))


def join_running_job(cfg: RunConfig, launch: LaunchEnvironment) -> dict[str, Any]:
    """Do the part of a task that may come late; arguments as of `train_external`.

    Returns:
        Status and reason of the run.

    Raises:
        ConfigError: it was started differently from the chief, or sees another folder.
        HangError: the chief did not come, or is gone.
        StoppedError, TerminatedError, HangupError: this process was asked to end; the others go on.
    """
    board = StoreClient(launch)
    patience = WaitReporter(lambda: launch.place_of(0), timeout_s=cfg.supervisor.join_timeout_s)
    with ExitStack() as stack:
        stack.callback(board.close)
        word = _read_join_info(board, stack, patience)
        problems = config_mismatches(
            config_digest(cfg), {launch.place_of(0): word["likeness"]}, origin=launch.place_of(launch.rank)
        )
        if problems:
            raise ConfigError(problems)
        global_size, micro_size = word["batch"]
        batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=None)
        plan = make_plan(replace(cfg, batch=batch), launch=launch)
        folder = RunFolder(Path(word["folder"]))
        fence = FencingToken.verify(folder, word["fence"])
        identity = identity_for(
            launch,
            plan,
            store=board.address,
            prefix=word["prefix"],
            token=os.environ.get(_TOKEN) or word["token"],
            life=board.add(f"{word['prefix']}/lives/{launch.rank}", 1) - 1,
        )
        failpoints.reload({**os.environ, **identity.to_environ()})
        report = Reporter(folder.error_of(launch.rank), launch.rank)
        with (
            redirect_output(folder.log_of(launch.rank)),
            StopFlag(None if identity.task.is_evaluator else _abort_task) as stop,
        ):
            try:
                run_task(plan.cfg, identity, folder, stop=stop, plan=plan, confirm=fence.check, report=report)
            except (StoppedError, TerminatedError, HangupError, KeyboardInterrupt):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - told in the words of this task
                _raise_cause(launch, folder, error, report)
        if stop.requested:
            raise stop_error(stop.requested, "the others go on.")
        return {**_outcome(folder), "folder": str(folder.path)}


def _read_join_info(board: StoreClient, stack: ExitStack, patience: WaitReporter) -> dict[str, Any]:
    """What the chief left, once it has."""
    board.open(stack, patience)
    while True:
        try:
            if board.has(_KEY):
                return _checked(board)
        except RuntimeError:  # the store's DistError: that of a run which was just ending
            board.open(stack, patience)
        patience.wait(_POLL_S)


def _checked(board: StoreClient) -> dict[str, Any]:
    try:
        word = expect_map(board.message(_KEY), _WORD)
        whole_numbers([one for one in word["batch"] if one is not None])
        if len(word["batch"]) != len(("global_size", "micro_size")):
            raise ValueError("its batch is not two numbers")
    except ValueError as error:
        raise board.misfit(_KEY, error) from None
    return word


def _abort_task(reason: Reason) -> None:
    """End this task at once: the others do its work."""
    raise stop_error(reason, "asked to end; the others go on.")


def _raise_cause(launch: LaunchEnvironment, folder: RunFolder, error: BaseException, report: Reporter) -> None:
    """Raise what ended this task, unless the training was over before it."""
    if training_has_ended(folder):
        return
    words = report(error)
    sys.stderr.write("".join(traceback.format_exception(error)))  # its log
    if not words.is_secondary:
        raise error
    if not training_has_ended(folder):
        raise HangError(
            f"{launch.place_of(0)} is gone, and with it the run. Start every task again; resume=auto goes on from the "
            "last checkpoint."
        ) from error


def _outcome(folder: RunFolder) -> dict[str, Any]:
    deadline = time.monotonic() + _SHUTDOWN_GRACE_S
    while (result := folder.read_result()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return {key: (result or {"status": "finished"}).get(key) for key in ("status", "reason")}
