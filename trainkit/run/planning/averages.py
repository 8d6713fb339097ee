"""The average of the weights that a run keeps: its config, its problems, and the names of its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainkit.adapters.average import Average
from trainkit.errors import Problem


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
