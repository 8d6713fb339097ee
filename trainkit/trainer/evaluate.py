"""Evaluate a split: every sample exactly once, on any number of ranks, with exact sums.

The batch statistics of a model may be counted again in the same way: those of a training are wrong for averaged
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.numerics.generators import Untouched
from trainkit.numerics.randomness import BlockKeys, keys_of
from trainkit.objectives.base import Access, Metric, Objective, RunningMean, terms_of
from trainkit.objectives.tables import Table, results_of
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
        for index, batch in enumerate(batches):
            with Untouched(seed=0, devices=[local.device]):
                enter(index * local.num_ranks + local.rank)
                loss = objective.loss(model, batch)
            if num_counted is None or index < num_counted:
                tally.add(loss.loss_sum, loss.weight)
                for name, term in terms_of(objective, loss).items():
                    terms[name].add(term, loss.weight)
                for metric in metrics.values():
                    metric.update(loss, batch)
            del loss  # frees the outputs before the next batch
    figures = {f"{split}/loss": tally.mean(local.data_ranks)}
    figures |= {f"{split}/{name}": sums.mean(local.data_ranks) for name, sums in terms.items()}
    tables: dict[str, Table] = {}
    for name, metric in metrics.items():
        numbers, arrays = results_of(f"{split}/{name}", metric.compute(local.data_ranks))
        figures |= numbers
        tables |= arrays
    return Evaluation(figures=figures, tables=tables)


def modules_with_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the modules of a model that keep batch statistics, by name.

    Example:
        >>> list(modules_with_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1']
    """
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return {name: module for name, module in modules if module.running_mean is not None}


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers with batch statistics, by canonical name; no copies."""
    return {
        f"{name}.{key}": buffer
        for name, module in modules_with_statistics(model).items()
        for key, buffer in module.named_buffers(recurse=False)
    }


def count_statistics(
    local: LocalModel, objective: Objective, batches: Iterable[Any], *, num_counted: int | None = None
) -> None:
    """Replace the batch statistics of a model by means over batches with equal weights; collective.

    As `torch.optim.swa_utils.update_bn`: forward passes in training mode. Random numbers of the model depend on the
    number of the batch. Other buffers do not change.

    Args:
        local: the model; its mode is restored afterwards.
        objective: calls the model.
        batches: this rank's batches: together the ranks have every sample once.
        num_counted: number of first batches that count; None: all.
    """
    model = local.model
    with evaluation_mode(local, objective) as enter, torch.no_grad():
        model.train()
        norms = {name: norm for name, norm in modules_with_statistics(model).items() if norm.training}  # others: frozen
        momenta = {name: norm.momentum for name, norm in norms.items()}
        others = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in statistics_of(model)}
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = None  # a mean of all batches
        for index, batch in enumerate(batches):
            counts = num_counted is None or index < num_counted
            saved = {} if counts else {name: buffer.clone() for name, buffer in statistics_of(model).items()}
            with Untouched(seed=0, devices=[local.device]):
                enter(index * local.num_ranks + local.rank)
                objective.loss(model, batch)
            restore_buffers(model, others | saved)
        for name, norm in norms.items():
            norm.momentum = momenta[name]
            if local.num_ranks > 1:
                buffers = dict(norm.named_buffers(recurse=False))
                count, mean, var = buffers["num_batches_tracked"], buffers["running_mean"], buffers["running_var"]
                sums = torch.cat([count.reshape(1).double(), mean.double() * count, var.double() * count])
                everywhere = local.data_ranks.sum(sums)
                means, variances = everywhere[1:].reshape(2, -1) / everywhere[0]
                for buffer, value in ((mean, means), (var, variances), (count, everywhere[0])):
                    buffer.copy_(value)


def restore_buffers(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Restore buffers from copies, by canonical name."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])
