"""The evaluator: scores each new complete checkpoint of a run in parallel to its training, which never waits for it.

It only reads the folder of checkpoints. It writes its results to `evaluations.jsonl`, one line per checkpoint, and to
an event file next to that of the training; it publishes the best checkpoint through `checkpoints/evaluated.json`
(`trainkit.trainer.checkpoint.saving`). It may die and be restarted at any moment: a finished checkpoint has its
line, and checkpoints with a line are not evaluated again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.adapters.average import AVERAGE
from trainkit.bounded import expect_map, parse_json
from trainkit.cluster.tasks import Identity
from trainkit.config.schema import MonitoredMetric
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import validation_splits
from trainkit.errors import AbsentFileError, CheckpointError, UnreadableError
from trainkit.files import open_regular, read_bytes, read_lines
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.adapters import averaged_split
from trainkit.run.planning.build import average_of, make_optimizer, transformed_model
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.optimizers import named_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.run.session.auxiliary import unprefetched_loader
from trainkit.run.session.checkpointer import retention_of
from trainkit.run.session.restore import make_step_context, refuse_malformed
from trainkit.storage import naming
from trainkit.strategies.base import SetupRequest
from trainkit.strategies.one_device import OneDevice
from trainkit.strategies.tensors.lazy_state import averaged_weights, model_weights
from trainkit.trainer.checkpoint.loading import Loaded, load
from trainkit.trainer.checkpoint.saving import EvaluatedIndex, Retention, exclusive
from trainkit.trainer.evaluate import Evaluation, evaluate, statistics_of
from trainkit.trainer.events import State
from trainkit.trainer.manifest import MANIFEST, Checkpoint, is_checkpoint, list_complete

if TYPE_CHECKING:
    from trainkit.report.events import EventFile

_MAX_BYTES: Final = 64 << 20
"""Size limit of a manifest."""
_POLL_INTERVAL_S: Final = 0.5
"""Seconds between two reads of the folder of checkpoints."""


def evaluate_checkpoints(
    plan: RunPlan,
    identity: Identity,
    folder: RunFolder,
    *,
    requested: Callable[[], str | None],
    on_phase: Callable[[str, int], None],
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
    if folder.trained.exists():
        return True
    result = folder.read_result()
    return result is not None and result.get("status") != "resized"


def evaluated_so_far(folder: RunFolder) -> tuple[int, list[str]]:
    """Return the number of evaluated checkpoints, and the names of those in the folder that are not evaluated."""
    rows = _rows(folder.evaluations)
    done = {row["manifest"] for row in rows}
    left = [
        one.folder.name for one in reversed(list_complete(folder.checkpoints)) if _content_id(one.folder) not in done
    ]
    return len(rows), left


class CheckpointEvaluator:
    """A model on one device, and the checkpoints that it has scored."""

    def __init__(self, plan: RunPlan, folder: RunFolder, *, device: str, on_phase: Callable[[str, int], None]) -> None:
        self._plan = plan.resolved(lambda: meta_model(plan))
        self._folder, self._on_phase = folder, on_phase
        cfg, parts = self._plan.cfg, self._plan.components
        self._strategy = OneDevice(device=device)
        identity = Identity.solo(device)
        model = transformed_model(cfg, self._strategy, identity.task)
        self._executor = self._strategy.setup(
            SetupRequest(
                model=model,
                identity=identity,
                precision=parts.precision,
                numerics=replace(parts.numerics, reproducible=False),
                make_optimizer=make_optimizer(cfg, model),
                optimizers=named_optimizers(cfg, self._plan.optimizers, model),
                training=make_step_context(self._plan),
                open_data=lambda wanted: unprefetched_loader(self._plan, wanted),
            )
        )
        self._batches = {
            split: EvalBatches(
                parts.datasets[split],
                self._plan.reading(self._executor.local.device),
                batch_size=self._plan.eval_batch_size,
                rank=0,
                num_ranks=1,
            )
            for split in validation_splits(parts.datasets)
        }
        self._watched = MonitoredMetric.of(cfg.eval)
        self._retention: Retention = retention_of(cfg)
        self._events: EventFile | None = None
        self._reported: set[str] = set()
        self.rows = _rows(folder.evaluations)
        """The results, one row per checkpoint, in the order of evaluation."""
        self.step = self.rows[-1]["step"] if self.rows else 0
        """The step of the latest evaluated checkpoint."""
        self._publish()

    def evaluate_next(self, requested: Callable[[], str | None] = lambda: None) -> dict[str, Any] | None:
        """Score the oldest checkpoint that is not evaluated; return its row, or None if there is none."""
        checkpoint = self._try_lock()
        if checkpoint is None:
            return None
        self.step = checkpoint.step
        self._on_phase("load", self.step)
        started = time.monotonic()
        mark = _content_id(checkpoint.folder)
        try:
            loaded = load(checkpoint.folder)
            refuse_malformed(loaded)
            self._take(loaded)
        except (CheckpointError, OSError) as error:
            self._reported.add(mark)
            print(f"{checkpoint.folder.name} is skipped: {error}", flush=True)  # noqa: T201 - written to the log of this task
            return self.evaluate_next(requested)
        parts = self._plan.components
        self._on_phase("evaluate", self.step)
        try:
            found = Evaluation(figures={}, tables={})
            for split, batches in self._batches.items():
                watched = self._watched_batches(batches, requested)
                one = evaluate(self._executor.local, parts.objective, watched, split=split)
                found.figures.update(one.figures)
                found.tables.update(one.tables)
            found.figures.update(self._of_averages(loaded, requested))
        except EvaluationAbortedError:
            return None
        state = State(plan=self._plan.batch)
        state.restore(loaded.meta["state"])
        row = {
            "step": checkpoint.step,
            "epoch": round(state.epoch, 6),
            **found.figures,
            **({"tables": {name: one.to_json() for name, one in found.tables.items()}} if found.tables else {}),
            "checkpoint": checkpoint.folder.name,
            "manifest": mark,
            "seconds": round(time.monotonic() - started, 3),
        }
        self._note(row, found)
        return row

    def close(self) -> None:
        """Release the model and close the event file."""
        self._publish()
        if self._events is not None:
            self._events.close()
        self._executor.close()

    def _try_lock(self) -> Checkpoint | None:
        """Return the oldest complete checkpoint without a row; it is not removed until another one is claimed."""
        done = {row["manifest"] for row in self.rows} | self._reported
        root = self._folder.checkpoints
        if not root.is_dir():
            return None
        with exclusive(root):
            for checkpoint in reversed(list_complete(root)):
                if _content_id(checkpoint.folder) not in done:
                    replace(EvaluatedIndex.read(root), evaluating=checkpoint.folder.name).write(root)
                    return checkpoint
        return None

    def _take(self, loaded: Loaded) -> None:
        self._executor.load_state_dict(model_weights(loaded.tensors))

    def _of_averages(self, loaded: Loaded, requested: Callable[[], str | None]) -> dict[str, float]:
        """Return the figures of the averaged weights in a checkpoint; empty without averages, or without their
        statistics.
        """
        average, model = average_of(self._plan.cfg), self._executor.local.model
        keys = {f"optimizer/{AVERAGE}/{name}" for name, _ in model.named_parameters()}
        keys = {key for key in keys if key in loaded.tensors}
        counted = statistics_of(model) if average is not None and average.counts_statistics else {}
        if average is None or not keys or any(f"optimizer/{AVERAGE}/{name}" not in loaded.tensors for name in counted):
            return {}
        self._executor.load_state_dict(averaged_weights(loaded.tensors))
        figures: dict[str, float] = {}
        for split, batches in self._batches.items():
            watched, label = self._watched_batches(batches, requested), averaged_split(split, average)
            objective = self._plan.components.objective
            figures.update(evaluate(self._executor.local, objective, watched, split=label).figures)
        return figures

    def _watched_batches(self, batches: EvalBatches, requested: Callable[[], str | None]) -> Iterator[Any]:
        for batch in batches:
            if requested() is not None:
                raise EvaluationAbortedError
            self._on_phase("evaluate", self.step)
            yield batch

    def _note(self, row: Mapping[str, Any], found: Evaluation) -> None:
        """Write a row to the event file, to `evaluations.jsonl`, and to the index that selects the best checkpoint."""
        if self._events is None:
            from trainkit.report.events import EventFile  # noqa: PLC0415 - protobuf, with the first evaluation

            self._events = EventFile(self._folder.tensorboard, suffix=".evaluator")
        now = time.time()
        self._events.scalars(found.figures, step=row["step"], wall_time=now)
        for name, table in found.tables.items():
            self._events.text(name, table.markdown(), step=row["step"], wall_time=now)
        self._events.flush()
        text = f"{json.dumps(row)}\n".encode()
        path = self._folder.evaluations
        with naming(path, needed=len(text)), open_regular(path, "ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(dict(row))
        self._publish()

    def _publish(self) -> None:
        root, name = self._folder.checkpoints, self._watched.metric
        if not root.is_dir():
            return
        metrics = {
            row["checkpoint"]: row[name]
            for row in self.rows
            if isinstance(row.get(name), float | int) and (root / row["checkpoint"]).is_dir()
        }
        self._retention.judge(root, EvaluatedIndex(metrics=metrics))


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
    try:
        lines = list(read_lines(path))
    except AbsentFileError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = expect_map(parse_json(line), {"step": int, "checkpoint": str, "manifest": str})
            rows += [row] if is_checkpoint(row["checkpoint"]) else []
    return rows
