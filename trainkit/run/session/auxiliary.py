"""Run a task that does not run the training loop: one that its strategy defines, or the evaluator of the run.

The evaluator scores each new complete checkpoint in parallel to the training, which never waits for it. It only reads
the folder of checkpoints, and writes its results to `evaluations.jsonl`, one line per checkpoint, and to an event file
next to that of the training; it publishes the best checkpoint through `checkpoints/evaluated.json`
(`trainkit.trainer.checkpoint.retention`). It may die and be restarted at any moment: a finished checkpoint has its
line, and checkpoints with a line are not evaluated again.

At the end the result of the run waits a bounded time until the last checkpoint is evaluated. All communication goes
through the run folder, so that runs of a supervisor, a cluster spec and TF_CONFIG end in the same way:

    rank 0       leaves the group, marks the training as ended (`live/trained`), waits, and then writes result.json
    evaluator    evaluates the remaining checkpoints, writes `live/evaluated.json`, and ends
    supervisor   writes `live/evaluated.json` if it gives up on the evaluator
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from trainkit.adapters.average import AVERAGE, Average
from trainkit.cluster.tasks import Identity
from trainkit.config.schema import MonitoredMetric
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import validation_splits
from trainkit.errors import AbsentFileError, CheckpointError, ConfigError, StopKind, UnreadableError
from trainkit.files import (
    expect_map,
    naming,
    open_regular,
    parse_json,
    read_bytes,
    read_lines,
    read_map,
    write_json_atomically,
)
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.build import average_of, averaged_split, transformed_model
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.error_report import read_error_report
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.run.session.checkpointer import retention_of
from trainkit.run.session.evaluation import eval_batches
from trainkit.run.session.restore import refuse_malformed, setup_request, unprefetched_loader
from trainkit.run.session.session import TaskSession
from trainkit.strategies.base import Data, PhaseListener, TaskContext
from trainkit.strategies.one_device import OneDevice
from trainkit.strategies.tensor_shards import averaged_weights, model_weights
from trainkit.trained.build import meta_model
from trainkit.trainer.checkpoint.tensors import Loaded, load
from trainkit.trainer.evaluate import Evaluation, evaluate, statistics_of
from trainkit.trainer.events import State
from trainkit.trainer.manifest import MANIFEST, Checkpoint, EvaluatedIndex, exclusive, is_checkpoint, list_complete

if TYPE_CHECKING:
    from trainkit.report.events import EventFile

Requested = Callable[[], StopKind | None]
"""Function that returns why this process was asked to stop, or None."""

_MAX_BYTES: Final = 64 << 20
"""Size limit of a manifest."""
_POLL_INTERVAL_S: Final = 0.5
"""Seconds between two reads of the folder of checkpoints."""
_NICENESS: Final = 5
"""`nice` increment of the evaluator on a CPU that it shares with the training."""
_POLL_S: Final = 0.2
_SILENT_S: Final = 300.0
"""Seconds without a heartbeat or result after which an unsupervised evaluator counts as lost."""
_FAILED_S: Final = 30.0
"""Seconds that a launcher has to restart an evaluator that has reported an error."""
_LOCKED_S: Final = 10.0
"""Seconds that the command of the run may still hold the lock of its folder."""


def run_auxiliary(
    plan: RunPlan, identity: Identity, folder: RunFolder, *, requested: Requested, on_phase: PhaseListener
) -> None:
    """Run an auxiliary task until it ends."""
    if identity.task.is_evaluator:
        os.nice(_NICENESS)
        folder.error_of(identity.task.rank).unlink(missing_ok=True)  # of an earlier start of this task
        if evaluate_checkpoints(plan, identity, folder, requested=requested, on_phase=on_phase):
            report_end(folder, EvaluatorEnd(status="finished"))
            if folder.read_result() is not None:  # rank 0 no longer waited
                bring_up_to_date(folder)
        return
    decided = plan.resolved(lambda: meta_model(plan.cfg))
    strategy = decided.components.strategy
    with ExitStack() as opened:

        def open_data(device: torch.device) -> Data:
            loader = unprefetched_loader(decided, device)
            opened.callback(loader.close)
            return loader

        request = setup_request(decided, identity, transformed_model(decided.cfg, strategy, identity.task))
        settings = {**vars(request), "open_data": open_data, "on_phase": on_phase}
        strategy.run_auxiliary(TaskContext(**settings, num_steps=decided.num_steps, requested=requested))


def evaluate_checkpoints(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,
    *,
    requested: Requested,
    on_phase: PhaseListener,
    has_ended: Callable[[], bool] | None = None,
) -> bool:
    """Evaluate each new checkpoint, until the last one of an ended training is done, or this process is asked to stop;
    the rest is evaluated when the run is resumed.

    Returns:
        Whether everything is done; False: this process was asked to stop before.
    """
    ended = has_ended or (lambda: training_has_ended(folder))
    evaluator = CheckpointEvaluator(plan, folder, device=identity.task.device, on_phase=on_phase)
    try:
        while requested() is None:
            is_last_look = ended()  # read first: a checkpoint may appear in between
            if evaluator.evaluate_next(requested):
                continue
            if is_last_look:
                return True
            on_phase("idle", evaluator.step)
            time.sleep(_POLL_INTERVAL_S)
    finally:
        evaluator.close()
    return False


def training_has_ended(folder: RunFolder) -> bool:
    """Return whether no checkpoint will follow: the training is marked as ended, or has a final result."""
    result = folder.read_result()
    return folder.trained.exists() or (result is not None and result.get("status") != "resized")


class CheckpointEvaluator:
    """A model on one device, and the checkpoints that it has scored."""

    def __init__(self, plan: RunPlan, folder: RunFolder, *, device: str, on_phase: PhaseListener) -> None:
        self._plan = plan.resolved(lambda: meta_model(plan.cfg))
        self._folder, self._on_phase = folder, on_phase
        cfg, parts = self._plan.cfg, self._plan.components
        strategy, identity = OneDevice(device=device), Identity.solo(device)
        request = setup_request(self._plan, identity, transformed_model(cfg, strategy, identity.task))
        self._executor = strategy.setup(replace(request, numerics=replace(parts.numerics, reproducible=False)))
        local, splits = self._executor.local, validation_splits(parts.datasets)
        self._batches = {split: eval_batches(self._plan, parts.datasets[split], local) for split in splits}
        self._events: EventFile | None = None
        self._damaged: set[str] = set()
        self.rows = _rows(folder.evaluations)
        """The results, one row per checkpoint, in the order of evaluation."""
        self.step = self.rows[-1]["step"] if self.rows else 0
        """The step of the latest evaluated checkpoint."""
        self._publish()

    def evaluate_next(self, requested: Requested = lambda: None) -> dict[str, Any] | None:
        """Score the oldest checkpoint that is not evaluated; return its row, or None if there is none."""
        while (checkpoint := self._claimed()) is not None:
            self.step = checkpoint.step
            self._on_phase("load", self.step)
            started, mark = time.monotonic(), _content_id(checkpoint.folder)
            try:
                loaded = load(checkpoint.folder)
                refuse_malformed(loaded)
                self._executor.load_state_dict(model_weights(loaded.tensors))
            except (CheckpointError, OSError) as error:
                self._damaged.add(mark)
                print(f"{checkpoint.folder.name} is skipped: {error}", flush=True)  # noqa: T201 - written to the log of this task
                continue
            try:
                evaluation = self._score(requested)
                if (average := self._shown_average(loaded)) is not None:
                    evaluation.figures.update(self._score(requested, average).figures)
            except EvaluationAbortedError:
                return None
            state = State(plan=self._plan.batch)
            state.restore(loaded.meta["state"])
            tables = {name: table.to_json() for name, table in evaluation.tables.items()}
            row = {
                "step": checkpoint.step,
                "epoch": round(state.epoch, 6),
                **evaluation.figures,
                **({"tables": tables} if tables else {}),
                "checkpoint": checkpoint.folder.name,
                "manifest": mark,
                "seconds": round(time.monotonic() - started, 3),
            }
            self._note(row, evaluation)
            return row
        return None

    def close(self) -> None:
        """Release the model and close the event file."""
        self._publish()
        if self._events is not None:
            self._events.close()
        self._executor.close()

    def _claimed(self) -> Checkpoint | None:
        """Return the oldest complete checkpoint without a row; it is not removed until another one is claimed."""
        evaluated, root = {row["manifest"] for row in self.rows} | self._damaged, self._folder.checkpoints
        if not root.is_dir():
            return None
        with exclusive(root):
            for checkpoint in reversed(list_complete(root)):
                if _content_id(checkpoint.folder) not in evaluated:
                    replace(EvaluatedIndex.read(root), evaluating=checkpoint.folder.name).write(root)
                    return checkpoint
        return None

    def _score(self, requested: Requested, average: Average | None = None) -> Evaluation:
        """Evaluate every validation split, by the weights that are shown; those of an average have names of their own.

        Raises:
            EvaluationAbortedError: this process was asked to stop.
        """
        whole = Evaluation(figures={}, tables={})

        def watched(batches: EvalBatches) -> Iterator[Any]:
            for batch in batches:
                if requested() is not None:
                    raise EvaluationAbortedError
                self._on_phase("evaluate", self.step)
                yield batch

        self._on_phase("evaluate", self.step)
        for split, batches in self._batches.items():
            label = split if average is None else averaged_split(split, average)
            evaluation = evaluate(self._executor.local, self._plan.components.objective, watched(batches), split=label)
            whole.figures.update(evaluation.figures)
            whole.tables.update(evaluation.tables)
        return whole

    def _shown_average(self, loaded: Loaded) -> Average | None:
        """Compute with the averaged weights of a checkpoint from now on; None if it has none, or not their
        statistics.
        """
        average, model = average_of(self._plan.cfg), self._executor.local.model
        counted = statistics_of(model) if average is not None and average.counts_statistics else {}
        names = {name for name, _ in model.named_parameters() if f"optimizer/{AVERAGE}/{name}" in loaded.tensors}
        if average is None or not names or any(f"optimizer/{AVERAGE}/{name}" not in loaded.tensors for name in counted):
            return None
        self._executor.load_state_dict(averaged_weights(loaded.tensors))
        return average

    def _note(self, row: dict[str, Any], evaluation: Evaluation) -> None:
        """Write a row to the event file, to `evaluations.jsonl`, and to the index that selects the best checkpoint."""
        if self._events is None:
            from trainkit.report.events import EventFile  # noqa: PLC0415 - protobuf, with the first evaluation

            self._events = EventFile(self._folder.tensorboard, suffix=".evaluator")
        self._events.scalars(evaluation.figures, step=row["step"])
        for name, table in evaluation.tables.items():
            self._events.text(name, table.markdown(), step=row["step"])
        self._events.flush()
        line = f"{json.dumps(row)}\n".encode()
        path = self._folder.evaluations
        with naming(path, needed=len(line)), open_regular(path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self._publish()

    def _publish(self) -> None:
        root, cfg = self._folder.checkpoints, self._plan.cfg
        name = MonitoredMetric.of(cfg.eval).metric
        if root.is_dir():
            metrics = {
                row["checkpoint"]: row[name]
                for row in self.rows
                if isinstance(row.get(name), float | int) and (root / row["checkpoint"]).is_dir()
            }
            retention_of(cfg).judge(root, EvaluatedIndex(metrics=metrics))


class EvaluationAbortedError(Exception):
    """Raised to abort an evaluation."""


def _content_id(folder: Path) -> str:
    """Return a hash that distinguishes checkpoints of the same step."""
    try:
        return hashlib.sha256(read_bytes(folder / MANIFEST, limit=_MAX_BYTES)).hexdigest()[:16]
    except UnreadableError:
        return ""


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier starts; an incomplete last line is ignored."""
    rows = []
    with contextlib.suppress(AbsentFileError):
        for line in read_lines(path):
            with contextlib.suppress(ValueError):
                row = expect_map(parse_json(line), {"step": int, "checkpoint": str, "manifest": str})
                rows += [row] if is_checkpoint(row["checkpoint"]) else []
    return rows


@dataclass(frozen=True, kw_only=True)
class EvaluatorEnd:
    """The end of the evaluator of an attempt: `live/evaluated.json`, which the result of the run waits for."""

    status: Literal["finished", "failed", "timed out", "stopped"]
    reason: str | None = None
    """Reason why it has not finished."""


def report_end(folder: RunFolder, end: EvaluatorEnd) -> None:
    """Report that no more checkpoints are evaluated; for the evaluator, or for the supervisor that gives up on it."""
    write_json_atomically(folder.evaluated, asdict(end))


def _reported_end(folder: RunFolder) -> EvaluatorEnd | None:
    """Return the reported end; None: the evaluator still works, or is lost."""
    try:
        content = read_map(folder.evaluated, {"status": str, "reason": (str, type(None))})
    except UnreadableError:
        return None
    return EvaluatorEnd(status="finished" if content["status"] == "finished" else "failed", reason=content["reason"])


def findings_of(session: TaskSession, folder: RunFolder, *, failed: bool, requested: Requested) -> dict[str, Any]:
    """Wait for the evaluator; return the entries of the result about it and about the best checkpoint. For rank 0.

    A training that failed or was asked to stop does not wait: the remaining checkpoints are evaluated when it is
    resumed.
    """
    if failed:
        end = EvaluatorEnd(status="stopped", reason="the training failed")
    elif session.run.stop_kind is not None:
        end = EvaluatorEnd(status="stopped", reason="the run was asked to end")
    else:
        session.enter("idle")
        rank = next(task.rank for task in session.plan.tasks if task.is_evaluator)
        limit_s = session.cfg.supervisor.evaluator_timeout_s
        end = await_evaluator(folder, rank, limit_s=limit_s, requested=requested)
    return {**folder.best_and_last(), "evaluator": describe(folder, end)}


def await_evaluator(
    folder: RunFolder,
    rank: int,
    *,
    limit_s: float,
    requested: Requested,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> EvaluatorEnd:
    """Mark the training as ended, and wait until the evaluator has evaluated the last checkpoint; for rank 0."""
    folder.trained.touch()
    evaluated: tuple[object, float] = None, clock()  # what was seen last, and when it first was
    alive = evaluated
    while (end := _reported_end(folder)) is None:
        if requested() is not None:
            return EvaluatorEnd(status="stopped", reason="the run was asked to end")
        size = folder.evaluations.stat().st_size if folder.evaluations.is_file() else 0
        report = read_error_report(folder.error_of(rank))
        sign = size, read_heartbeat(folder.heartbeat_of(rank)), report is not None
        evaluated = evaluated if evaluated[0] == size else (size, clock())
        alive = alive if alive[0] == sign else (sign, clock())
        silent_s = clock() - alive[1]
        if clock() - evaluated[1] > limit_s:
            reason = f"no checkpoint was evaluated in {limit_s:g} s (supervisor.evaluator_timeout_s)"
            return EvaluatorEnd(status="timed out", reason=reason)
        if report is not None and silent_s > _FAILED_S:
            return EvaluatorEnd(status="failed", reason=f"{report.kinds[0]}: {report.summary}")
        if silent_s > _SILENT_S:
            return EvaluatorEnd(status="failed", reason=f"it sent no heartbeat for {_SILENT_S:g} s")
        sleep(_POLL_S)
    return end


def describe(folder: RunFolder, end: EvaluatorEnd) -> dict[str, Any]:
    """Return the entry of result.json about the evaluator.

    An evaluator that was stopped after evaluating every checkpoint counts as finished.
    """
    try:
        rows = _rows(folder.evaluations)
    except UnreadableError as error:
        return {"status": "failed", "reason": str(error), "evaluated": 0, "not_evaluated": []}
    evaluated = {row["manifest"] for row in rows}
    complete = [checkpoint.folder for checkpoint in reversed(list_complete(folder.checkpoints))]
    remaining = [path.name for path in complete if _content_id(path) not in evaluated]
    if end.status == "stopped" and not remaining:
        end = EvaluatorEnd(status="finished")
    return {"status": end.status, "reason": end.reason, "evaluated": len(rows), "not_evaluated": remaining}


def bring_up_to_date(folder: RunFolder) -> bool:
    """Update a result that was written before the evaluator had finished; return whether that was done.

    A run that continues in the folder is not touched: it writes its own result.
    """
    deadline = time.monotonic() + _LOCKED_S
    while True:
        with contextlib.suppress(ConfigError), folder.lock():
            result = folder.read_result()
            if result is not None and result.get("status") != "resized":
                entry = describe(folder, EvaluatorEnd(status="finished"))
                folder.write_result({**result, **folder.best_and_last(), "evaluator": entry})
            return result is not None
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
