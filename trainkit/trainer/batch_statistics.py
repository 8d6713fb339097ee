"""Count the batch statistics of a model again over a dataset: those of a training are wrong for averaged weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.numerics.generators import Untouched
from trainkit.numerics.randomness import BlockKeys, keys_of
from trainkit.objectives.base import Objective
from trainkit.strategies.base import LocalModel


def modules_with_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the modules of a model that keep batch statistics, by name.

    Example:
        >>> list(modules_with_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1']
    """
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return {name: module for name, module in found if module.running_mean is not None}


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
    model, was_training = local.model, local.model.training
    keys = keys_of(model) or BlockKeys(model, seed=0, devices=[local.device])
    model.train()
    modules = {name: one for name, one in modules_with_statistics(model).items() if one.training}  # others are frozen
    momenta = {name: module.momentum for name, module in modules.items()}
    others = {name: one.clone() for name, one in model.named_buffers() if name not in statistics_of(model)}
    for module in modules.values():
        module.reset_running_stats()
        module.momentum = None  # a mean of all batches
    try:
        with torch.no_grad(), local.precision.autocast(local.device_types):
            for place, batch in enumerate(batches):
                counts = num_counted is None or place < num_counted
                kept = {} if counts else {name: one.clone() for name, one in statistics_of(model).items()}
                with Untouched(seed=0, devices=[local.device]):
                    keys.enter_evaluation(batch=place * local.num_ranks + local.rank, objective=objective)
                    objective.loss(model, batch)
                restore_buffers(model, others | kept)
    finally:
        model.train(was_training)
        for name, module in modules.items():
            module.momentum = momenta[name]
    if local.num_ranks > 1:
        _join(local, modules.values())


def restore_buffers(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Restore buffers from copies, by canonical name."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])


def _join(local: LocalModel, modules: Iterable[_BatchNorm]) -> None:
    """Replace the means of each rank by those of all ranks; collective."""
    with torch.no_grad():
        for module in modules:
            count, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
            assert count is not None
            assert mean is not None
            assert var is not None
            here = torch.cat([count.reshape(1).double(), mean.double() * count, var.double() * count])
            everywhere = local.data_ranks.sum(here)
            means, variances = everywhere[1:].reshape(2, -1) / everywhere[0]
            mean.copy_(means)
            var.copy_(variances)
            count.copy_(everywhere[0])
