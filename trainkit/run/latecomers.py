"""Tasks of a launch that may come when they like, and come again: workers that hold nothing, and the evaluator.

The others meet and begin without them (`trainkit.run.joining`). Then the chief leaves word in the store, and whoever
comes, early or late, for the first time or again, reads it: which folder, which batch, which config. Nobody waits for
one that leaves.
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
from trainkit.cluster.launch import Launch
from trainkit.config.build import build
from trainkit.config.schema import Batch, RunConfig
from trainkit.engine import failpoints
from trainkit.errors import ConfigError, HangError, HangupError, StoppedError, TerminatedError
from trainkit.run.alikeness import differences, likeness
from trainkit.run.board import Board
from trainkit.run.entering import identity_in, into_log
from trainkit.run.evaluating import training_has_ended
from trainkit.run.fence import Fence
from trainkit.run.folder import RunFolder
from trainkit.run.last_words import Reporter
from trainkit.run.meeting import Meeting
from trainkit.run.plan import make_plan
from trainkit.run.runner import run_task
from trainkit.run.stopping import Reason, StopFlag, stop_error
from trainkit.run.waiting import Patience
from trainkit.strategies.base import Strategy

__all__ = ["join_late", "late_ranks", "let_in", "shared_token"]

_KEY: Final = "trainkit/open"
_WORD: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("prefix", "folder", "fence", "token"), str),
    "likeness": dict,
    "batch": list,
}
_POLL_S: Final = 0.2
_TOKEN: Final = "TRAINKIT_TOKEN"  # noqa: S105 - the name of the variable that holds it
_FAREWELL_S: Final = 30.0
"""How long a task that was sent home waits for the result, which the chief still writes."""


def late_ranks(cfg: RunConfig, launch: Launch) -> frozenset[int]:
    """The ranks of a launch that the others do not wait for.

    Raises:
        ConfigError: the strategy cannot be built.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    return frozenset(task.rank for task in launch.tasks if task.is_evaluator or strategy.replaces(task))


def shared_token(meeting: Meeting) -> str:
    """What the tasks of this run know: as the environment says, else made by the chief; collective.

    One that the chief makes goes through the store, where whoever reaches its port can read it.
    """
    made: str = meeting.first(lambda: token_hex(32))
    return os.environ.get(_TOKEN) or made


def let_in(meeting: Meeting, cfg: RunConfig, batch: Batch, *, folder: RunFolder, fence: Fence, token: str) -> None:
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
        "likeness": likeness(cfg),
        "batch": [batch.global_size, batch.micro_size],
        "folder": str(folder.path.absolute()),
        "fence": fence.token,
        "token": "" if os.environ.get(_TOKEN) else token,
    }
    meeting.leave_word(_KEY, json.dumps(word))


def join_late(cfg: RunConfig, launch: Launch) -> dict[str, Any]:
    """Do the part of a task that may come late; arguments as of `train_launched`.

    Returns:
        Status and reason of the run.

    Raises:
        ConfigError: it was started differently from the chief, or sees another folder.
        HangError: the chief did not come, or is gone.
        StoppedError, TerminatedError, HangupError: this process was asked to end; the others go on.
    """
    board = Board(launch)
    patience = Patience(lambda: launch.place_of(0), timeout_s=cfg.supervisor.join_timeout_s)
    with ExitStack() as stack:
        stack.callback(board.close)
        word = _word(board, stack, patience)
        problems = differences(
            likeness(cfg), {launch.place_of(0): word["likeness"]}, origin=launch.place_of(launch.rank)
        )
        if problems:
            raise ConfigError(problems)
        global_size, micro_size = word["batch"]
        batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=None)
        plan = make_plan(replace(cfg, batch=batch), launch=launch)
        folder = RunFolder(Path(word["folder"]))
        fence = Fence.seen(folder, word["fence"])
        identity = identity_in(
            launch,
            plan,
            store=board.address,
            prefix=word["prefix"],
            token=os.environ.get(_TOKEN) or word["token"],
            life=board.add(f"{word['prefix']}/lives/{launch.rank}", 1) - 1,
        )
        failpoints.arm({**os.environ, **identity.to_environ()})
        report = Reporter(folder.error_of(launch.rank), launch.rank)
        with into_log(folder.log_of(launch.rank)), StopFlag(None if identity.task.is_evaluator else _leave) as stop:
            try:
                run_task(plan.cfg, identity, folder, stop=stop, plan=plan, confirm=fence.check, report=report)
            except (StoppedError, TerminatedError, HangupError, KeyboardInterrupt):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - told in the words of this task
                _explain(launch, folder, error, report)
        if stop.requested:
            raise stop_error(stop.requested, "the others go on.")
        return {**_outcome(folder), "folder": str(folder.path)}


def _word(board: Board, stack: ExitStack, patience: Patience) -> dict[str, Any]:
    """What the chief left, once it has."""
    board.open(stack, patience)
    while True:
        try:
            if board.has(_KEY):
                return _checked(board)
        except RuntimeError:  # the store's DistError: that of a run which was just ending
            board.open(stack, patience)
        patience.wait(_POLL_S)


def _checked(board: Board) -> dict[str, Any]:
    try:
        word = expect_map(board.message(_KEY), _WORD)
        whole_numbers([one for one in word["batch"] if one is not None])
        if len(word["batch"]) != len(("global_size", "micro_size")):
            raise ValueError("its batch is not two numbers")
    except ValueError as error:
        raise board.misfit(_KEY, error) from None
    return word


def _leave(reason: Reason) -> None:
    """End this task at once: the others do its work."""
    raise stop_error(reason, "asked to end; the others go on.")


def _explain(launch: Launch, folder: RunFolder, error: BaseException, report: Reporter) -> None:
    """Raise what ended this task, unless the training was over before it."""
    if training_has_ended(folder):
        return
    words = report(error)
    sys.stderr.write("".join(traceback.format_exception(error)))  # its log
    if not words.aftermath:
        raise error
    if not training_has_ended(folder):
        raise HangError(
            f"{launch.place_of(0)} is gone, and with it the run. Start every task again; resume=auto goes on from the "
            "last checkpoint."
        ) from error


def _outcome(folder: RunFolder) -> dict[str, Any]:
    deadline = time.monotonic() + _FAREWELL_S
    while (result := folder.read_result()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return {key: (result or {"status": "finished"}).get(key) for key in ("status", "reason")}
