"""What a model's modules say about a plan, before it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.drawing import draws_at_random
from trainkit.run.building import shaping_of
from trainkit.run.plan import RunPlan
from trainkit.strategies.layouts import layout_problems
from trainkit.strategies.shaping import shaping_notes, shaping_problems

__all__ = ["model_notes"]


def model_notes(plan: RunPlan, model: nn.Module) -> list[str]:
    """What the user should know about this strategy, and about this model on this placement.

    Raises:
        ConfigError: the strategy cannot place this model as it is asked to, or batch statistics would be taken of a
            single sample.
    """
    strategy, shaping = plan.parts.strategy, shaping_of(plan.cfg)
    problems = [*layout_problems(model), *strategy.problems_with(model, plan.facts)]
    named = plan.cfg.strategy["_target_"].rpartition(".")[2]
    problems += shaping_problems(model, shaping, compiles=strategy.compiles, strategy=named)
    if problems:
        raise ConfigError(problems)
    statistics = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]  # noqa: SLF001
    _refuse_single_samples(plan, statistics)
    notes, said = [*strategy.notes(), *strategy.notes_with(model), *shaping_notes(model, shaping)], []
    if any(draws_at_random(module) for module in model.modules()):
        said.append("draws random numbers")
    if statistics:
        said.append("keeps batch statistics")
    if not said or not plan.micro_follows or strategy.is_another_training:
        return notes
    what = " and ".join(said)
    micro = plan.batch.micro_size
    return [
        *notes,
        f"the model {what}: another number of replicas is another training, unless batch.micro_size={micro} is set.",
    ]


def _refuse_single_samples(plan: RunPlan, statistics: Sequence[nn.Module]) -> None:
    if not any(isinstance(module, nn.BatchNorm1d) for module in statistics):
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
