"""Evaluate splits during a run, also by averages of the weights, and keep track of the best result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.adapters.average import AVERAGE, Average
from trainkit.config.schema import MonitoredMetric
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import validation_splits
from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.objectives.base import Metric
from trainkit.objectives.tables import Table
from trainkit.run.planning.build import average_of, averaged_split
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import Executor, LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.evaluate import Evaluation, count_statistics, evaluate, restore_buffers, statistics_of
from trainkit.trainer.events import Run
from trainkit.trainer.loop import CallbackHooks
from trainkit.trainer.manifest import Retention, better, list_complete

MOST_CELLS: Final = 10_000
"""Largest number of cells of a table in result.json; larger tables are only in tables.jsonl."""


def eval_batches(plan: RunPlan, dataset: Any, local: LocalModel) -> EvalBatches:
    """Return the batches of a rank in the evaluation of a dataset."""
    return EvalBatches(
        dataset,
        plan.reading(local.device),
        batch_size=plan.eval_batch_size,
        rank=local.rank,
        num_ranks=local.num_ranks,
        together=plan.components.strategy.facts_in(plan.context).forward_is_collective,
    )


def with_heartbeats(batches: Iterable[Any], enter: Callable[[str], None]) -> Iterator[Any]:
    """Report a heartbeat per batch: `supervisor.eval_timeout_s` is the limit of a batch."""
    for batch in batches:
        yield batch
        enter("evaluate")


@dataclass(kw_only=True, eq=False)
class EvalRunner:
    """Evaluates splits and stores their metrics."""

    plan: RunPlan
    run: Run
    executor: Executor
    callbacks: CallbackHooks
    enter: Callable[[str], None]
    """Callback that reports the begin of a phase."""
    figures: dict[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    tables: dict[str, Table] = field(default_factory=dict)
    """The newest version of each table."""
    has_evaluated: bool = False
    """Whether this process has evaluated."""
    _validated_at: int | None = None

    @cached_property
    def averages(self) -> Averages | None:
        """The averages of the weights; None if the run keeps none."""
        average = average_of(self.plan.cfg)
        return None if average is None else Averages(average, self.plan, self.run, self.executor, enter=self.enter)

    @cached_property
    def _watched(self) -> MonitoredMetric:
        return MonitoredMetric.of(self.plan.cfg.eval)

    @property
    def is_up_to_date(self) -> bool:
        """Whether the validation splits were evaluated at the current step."""
        return self._validated_at == self.run.state.step

    @property
    def metric(self) -> float | None:
        """The monitored metric, if it was measured at this step."""
        return self.figures.get(self._watched.metric) if self.is_up_to_date else None

    def results(self) -> dict[str, Any]:
        """Return the entries of result.json: the metrics, and the tables, if there are any."""
        figures = {name: value for name, value in self.figures.items() if not math.isnan(value)}
        small = {name: table.to_json() for name, table in self.tables.items() if table.num_cells <= MOST_CELLS}
        return {"metrics": figures, "tables": small} if small else {"metrics": figures}

    def forget(self) -> None:
        """Drop the metrics: the training rolls back to an earlier step, or measures them again."""
        self._validated_at = None
        self.figures.clear()
        self.tables.clear()

    def score(self, splits: Sequence[str]) -> None:
        """Evaluate splits, and pass their metrics to the callbacks as one row; collective."""
        figures: dict[str, float] = {}
        tables: dict[str, Table] = {}
        evaluations = [self._measured(split) for split in splits]
        if self.averages is not None:
            with self.averages.shown() as present:
                average = self.averages.average
                evaluations += [self._measured(split, averaged_split(split, average)) for split in splits if present]
        for evaluation in evaluations:
            figures |= evaluation.figures
            tables |= evaluation.tables
        self.figures.update(figures)
        self.tables.update(tables)
        row = {"step": self.run.state.step, "epoch": self.run.state.epoch, **figures}
        self.callbacks.call("eval_end", self.run, row)
        if tables:
            self.callbacks.call("eval_tables", self.run, tables)
        if validation_splits(splits):
            self._validated_at = self.run.state.step

    def _measured(self, split: str, label: str | None = None) -> Evaluation:
        """Evaluate a split; refuse a monitored metric of it that is not a number: there would be no best checkpoint."""
        evaluation, name = self.measure(split, label=label, more=self._details(split)), self._watched.metric
        if name.startswith(f"{label or split}/") and name not in evaluation.figures:
            problem = "is a table, not a number" if name in evaluation.tables else "is not a computed metric"
            rule = f"{problem}. There are: {', '.join(evaluation.figures)}."
            raise ConfigError([Problem(key="eval.metric", value=name, rule=rule)])
        return evaluation

    def refuse_here(self, split: str, dataset: Any) -> None:
        """Refuse an evaluation for a callback if the ranks cannot run it together.

        Raises:
            TrainingError: names the reason.
        """
        callback, hook = self.callbacks.running or (None, "no hook")
        step, splits = self.run.state.step, self.plan.components.datasets
        if hook in ("checkpoint_saved", "run_end"):
            ended = "after the process group has ended"
            reason = f"{hook} runs {'on only one rank' if hook == 'checkpoint_saved' else ended}"
        elif callback is not None and callback.observes:
            reason = "an observer calls no collective: set observes = False"
        elif self.plan.next_sync_step(step) != step:
            reason = f"after step {step} the replicas differ: evaluate in eval_end"
        elif dataset is None and split not in splits:
            reason = f"the data has the splits {', '.join(splits)}"
        else:
            return
        raise TrainingError(f"{split} cannot be evaluated in {hook}: {reason}.")

    def _details(self, split: str) -> dict[str, Metric]:
        """Return the additional metrics of callbacks, new objects for each evaluation."""
        names = dict.fromkeys(name for callback in self.callbacks for name in callback.details)
        if not names:
            return {}
        objective, dataset = self.plan.components.objective, self.plan.components.datasets[split]
        details, metrics = objective.details(dataset, batch_size=self.plan.eval_batch_size).metrics, objective.metrics()
        return {name: details[name] for name in names if name in details and name not in metrics}

    def measure(
        self, split: str, dataset: Any = None, *, label: str | None = None, more: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Evaluate a split, or another dataset instead; collective.

        Args:
            split: the split.
            dataset: samples to use instead of the split.
            label: replaces the name of the split in names of metrics.
            more: additional metrics.
        """
        self.has_evaluated = True
        dataset = self.plan.components.datasets[split] if dataset is None else dataset
        batches = eval_batches(self.plan, dataset, self.executor.local)
        return evaluate(
            self.executor.local,
            self.plan.components.objective,
            with_heartbeats(batches, self.enter),
            split=label or split,
            num_counted=batches.num_counted,
            more_metrics=more,
        )

    def update_best(self) -> bool:
        """Record the model as the best so far if it is; return whether it is."""
        value, state = self.metric, self.run.state
        if value is None or not better(value, state.best, self._watched.mode):
            return False
        state.take_best(value)
        return True

    def recall_best(self, report: Callable[[str], None]) -> None:
        """Take the best value from the checkpoints that are there, after a restore: only those can be `best` later.

        `report` receives a line if the checkpoint of the best value so far is not there.
        """
        settings, state = self.plan.cfg.checkpoint, self.run.state
        if not settings.keep_best or self.plan.has_evaluator:
            return
        checkpoints = [saved for saved in list_complete(self.run.folder / "checkpoints") if saved.step <= state.step]
        ranked = Retention(mode=self._watched.mode).ranked(checkpoints)
        best = ranked[0].metric if ranked else None
        if state.best not in (None, best):
            since = f"is {best:g}" if best is not None else f"counts from step {state.step:,} on"
            report(
                f"the best {self._watched.metric} so far was {state.best:g}, and its checkpoint was not kept: the best "
                f"{since}."
            )
        state.take_best(best)


class Averages:
    """The averages of one rank.

    Batch statistics collected in training do not fit a mean of weights (`swa`). They are computed again only after the
    last step, since that takes a pass over the training data; until then such averages are not evaluated.
    """

    def __init__(
        self, average: Average, plan: RunPlan, run: Run, executor: Executor, *, enter: Callable[[str], None]
    ) -> None:
        self.average, self._plan, self._run, self._executor, self._enter = average, plan, run, executor, enter
        self._counts = average.counts_statistics and bool(statistics_of(executor.local.model))
        self._counted: dict[str, Tensor] = {}
        """Batch statistics of the averages; empty before the last step."""
        self._over = False
        """Whether the training has ended before its last step."""

    def end_early(self) -> bool:
        """Record that the training ends before its last step; return whether it must be evaluated and saved again."""
        again = self._counts_later
        self._over = True
        return again

    @property
    def _counts_later(self) -> bool:
        """Whether batch statistics are computed again, at a later step."""
        return self._counts and not self._over and self._run.state.step < self._plan.num_steps

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Let the local model compute with the averages; yields whether there are any. Collective."""
        if self._counts_later:
            self._counted = {}
            yield False
            return
        model = self._executor.local.model
        statistics = {name: buffer.clone() for name, buffer in statistics_of(model).items()} if self._counts else {}
        swapped = self._executor.swap_averages()
        try:
            present = bool(self._executor.local.all_ranks.sum(torch.tensor([float(swapped)])).item())
            if present and self._counts:
                self._set_statistics()
            yield present
        finally:
            if swapped:
                self._executor.swap_averages()
            if self._counts:
                restore_buffers(model, statistics)

    def statistics(self) -> dict[str, Tensor]:
        """Return the batch statistics of the averages for a checkpoint; after the last step. Collective."""
        if self._counts and not self._counted:
            with self.shown():
                pass
        return {f"optimizer/{AVERAGE}/{name}": tensor for name, tensor in self._counted.items()}

    def _set_statistics(self) -> None:
        model = self._executor.local.model
        if self._counted:
            restore_buffers(model, self._counted)
            return
        local, parts = self._executor.local, self._plan.components
        if local.lanes is not None:  # every rank counts all batches, in the order of one device
            local = LocalModel(
                model=model,
                device=local.device,
                device_types=local.device_types,
                data_ranks=LocalCollective(),
                precision=local.precision,
            )
        batches = eval_batches(self._plan, parts.datasets["train"], local)
        counted = with_heartbeats(batches, self._enter)
        count_statistics(local, parts.objective, counted, num_counted=batches.num_counted)
        self._counted = {name: buffer.clone() for name, buffer in statistics_of(model).items()}
