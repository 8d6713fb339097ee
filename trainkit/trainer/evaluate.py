"""Evaluation: every sample is evaluated exactly once, on any number of ranks, and summed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainkit.numerics.generators import Untouched
from trainkit.numerics.randomness import BlockKeys, keys_of
from trainkit.objectives.base import Objective, RunningMean
from trainkit.strategies.base import LocalModel


def evaluate(
    local: LocalModel, objective: Objective, batches: Iterable[Any], *, split: str, num_counted: int | None = None
) -> dict[str, float]:
    """Evaluate the model on a split; collective.

    Random numbers of the model or the objective depend on (seed, batch number, block): they are the same in every
    evaluation.

    Args:
        local: the model; in training mode again afterwards.
        objective: computes the loss and the metrics.
        batches: this rank's batches, on its device: together the ranks have every sample once.
        split: prefix of the metric names, `val/loss`.
        num_counted: how many of the first batches count; None: all. The others exist because other ranks run the model
            together with this one.

    Returns:
        `split/loss`, the mean over all targets, and each metric, the same on every rank.
    """
    model = local.model
    tally, metrics = RunningMean(), objective.metrics()
    keys = keys_of(model) or BlockKeys(model, seed=0, devices=[local.device])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), local.precision.autocast(local.device_types):
            for place, batch in enumerate(batches):
                with Untouched(seed=0, devices=[local.device]):
                    keys.enter_evaluation(batch=place * local.num_ranks + local.rank, objective=objective)
                    loss = objective.loss(model, batch)
                if num_counted is not None and place >= num_counted:
                    continue
                tally.add(loss.loss_sum, loss.weight)
                for metric in metrics.values():
                    metric.update(loss, batch)
    finally:
        model.train(was_training)
    figures = {f"{split}/loss": tally.mean(local.data_ranks)}
    figures.update({f"{split}/{name}": metric.compute(local.data_ranks) for name, metric in metrics.items()})
    return figures
