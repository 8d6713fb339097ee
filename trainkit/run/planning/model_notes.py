"""Notes and problems of a model under a plan, before it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.build import model_transforms_of
from trainkit.run.planning.data_notes import data_notes
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.capabilities import notes_of, validate_model
from trainkit.strategies.model_transforms import shaping_notes, shaping_problems
from trainkit.strategies.tensors.layouts import layout_problems

__all__ = ["model_notes"]


def model_notes(plan: RunPlan, model: nn.Module) -> list[str]:
    """Return notes for the user about the data, about this strategy, and about this model under it.

    Raises:
        ConfigError: the strategy cannot place this model as configured, or batch statistics would be computed over a
            single sample.
    """
    strategy, shaping = plan.components.strategy, model_transforms_of(plan.cfg)
    problems = [*layout_problems(model), *validate_model(strategy, model, plan.facts)]
    named = plan.cfg.strategy["_target_"].rpartition(".")[2]
    problems += shaping_problems(model, shaping, compiles=strategy.traits.compiles, strategy=named)
    if problems:
        raise ConfigError(problems)
    # torch refuses these classes with a single sample
    statistics = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m.training]
    _refuse_single_samples(plan, statistics)
    return [*data_notes(plan.components), *notes_of(strategy, model), *shaping_notes(model, shaping)]


def _refuse_single_samples(plan: RunPlan, statistics: Sequence[nn.Module]) -> None:
    if not statistics:
        return
    for step in {0, plan.batch.steps_per_epoch - 1}:
        smallest = plan.batch.shard_size(step, plan.batch.num_shards(step) - 1)
        if smallest == 1:
            size = plan.batch.batch_size(step)
            rule = (
                f"cuts a batch of {size} samples so that a shard has one, which has no batch statistics "
                f"({type(statistics[0]).__name__}). Use another batch.global_size or batch.micro_size, or "
                "batch.drop_last=true."
            )
            raise ConfigError([Problem(key="batch.micro_size", value=plan.batch.micro_size, rule=rule)])
