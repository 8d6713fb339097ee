"""Build the adapters of a run: layers that are converted before other changes of the model, and averages of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from trainkit.adapters.average import Average
from trainkit.adapters.float8 import Float8
from trainkit.errors import Problem
from trainkit.objectives.linear_cross_entropy import offered_by
from trainkit.strategies.shipped import names_of


def output_name(model: nn.Module) -> str | None:
    """Return the name of the output layer: the one that the model declares, else its last linear layer.

    Example:
        >>> output_name(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()))
        '1'
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    offered = offered_by(model)
    named = next((name for name, module in linear.items() if module is offered), None)
    return named or next(reversed(linear), None)


def conversion_problems(
    conversion: Float8, model: nn.Module, *, devices: list[str], precision: str, strategy: str, converts: bool
) -> list[Problem]:
    """Return the problems of a conversion for a model, a strategy and the devices of its tasks.

    Args:
        conversion: the conversion.
        model: the model, possibly without data.
        devices: the devices of the tasks.
        precision: value of the precision.
        strategy: the strategy's name.
        converts: whether the strategy supports converted layers.
    """
    if not converts:
        others = names_of(lambda kind: kind.facts.converts)
        rule = f"strategy={strategy} does not support converted layers. Use convert=none, or {others}."
        return [Problem(key="convert", value="float8", rule=rule)]
    return conversion.problems(model, output=output_name(model), devices=devices, precision=precision)


def converted(model: nn.Module, conversion: Float8) -> nn.Module:
    """Return a model with converted layers; the output layer is left to the conversion."""
    return conversion.convert(model, output=output_name(model))


def averaged_split(split: str, average: Average) -> str:
    """Return the name of a split in the metrics of the averaged weights.

    Example:
        >>> from trainkit.adapters.average import Ema
        >>> averaged_split("val", Ema())
        'val_ema'
    """
    return f"{split}_{average.name}"


def average_problems(average: Average, splits: Iterable[str], num_steps: int) -> Iterator[Problem]:
    """Yield the problems of an average that never begins, or whose metrics have the name of a split of the data."""
    splits = list(splits)
    if average.start_step > num_steps:
        rule = f"is after the last step: the run has {num_steps:,}. Give a smaller one."
        yield Problem(key="average.start_step", value=average.start_step, rule=rule)
    for split in splits:
        if (name := averaged_split(split, average)) in splits:
            rule = f"names its metrics {name}/..., and the data has a split of that name. Rename the split."
            yield Problem(key="average", value=average.name, rule=rule)
