"""Evaluate a split: every sample exactly once, on any number of ranks, with exact sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.numerics.generators import Untouched
from trainkit.numerics.randomness import BlockKeys, keys_of
from trainkit.objectives.base import Access, Metric, Objective, RunningMean
from trainkit.objectives.tables import Table, results_of
from trainkit.objectives.terms import terms_of
from trainkit.strategies.base import LocalModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results on a split, by name; the same on every rank."""

    figures: dict[str, float]
    """`split/loss` and each term of the loss, their means over all targets, and the metrics that are numbers."""
    tables: dict[str, Table]
    """The metrics that are tensors of several numbers, or tables."""


@contextmanager
def evaluation_mode(local: LocalModel, objective: Objective) -> Iterator[Callable[[int], None]]:
    """Keep the model in evaluation mode during the block, without gradients unless the objective needs them.

    Yields:
        A function that takes the number of the next batch in the split: random numbers of the model or the objective
        depend on (seed, batch number, block), and are the same in every evaluation.
    """
    model = local.model
    keys = keys_of(model) or BlockKeys(model, seed=0, devices=[local.device])
    was_training = model.training
    model.eval()
    try:
        with (
            torch.set_grad_enabled(Access.derivatives in objective.needs),
            local.precision.autocast(local.device_types),
        ):
            yield lambda number: keys.enter_evaluation(batch=number, objective=objective)
    finally:
        model.train(was_training)


def evaluate(
    local: LocalModel,
    objective: Objective,
    batches: Iterable[Any],
    *,
    split: str,
    num_counted: int | None = None,
    more_metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Evaluate the model on a split; collective.

    Args:
        local: the model; its training mode is restored afterwards.
        objective: computes the loss and the metrics.
        batches: this rank's batches, on its device: together the ranks have every sample once.
        split: prefix of the metric names, `val/loss`.
        num_counted: number of first batches that count; None: all. The others exist because other ranks run the model
            together with this one.
        more_metrics: new metric objects in addition to those of the objective, by name.

    Raises:
        TrainingError: a metric returns something other than numbers and tables.
    """
    model = local.model
    tally, metrics = RunningMean(), {**objective.metrics(), **(more_metrics or {})}
    terms = {name: RunningMean() for name in objective.term_names}
    with evaluation_mode(local, objective) as enter:
        for place, batch in enumerate(batches):
            with Untouched(seed=0, devices=[local.device]):
                enter(place * local.num_ranks + local.rank)
                loss = objective.loss(model, batch)
            if num_counted is None or place < num_counted:
                tally.add(loss.loss_sum, loss.weight)
                for name, term in terms_of(objective, loss).items():
                    terms[name].add(term, loss.weight)
                for metric in metrics.values():
                    metric.update(loss, batch)
            del loss  # frees the outputs before the next batch
    figures = {f"{split}/loss": tally.mean(local.data_ranks)}
    figures.update({f"{split}/{name}": sums.mean(local.data_ranks) for name, sums in terms.items()})
    tables: dict[str, Table] = {}
    for name, metric in metrics.items():
        numbers, more = results_of(f"{split}/{name}", metric.compute(local.data_ranks))
        figures.update(numbers)
        tables.update(more)
    return Evaluation(figures=figures, tables=tables)
