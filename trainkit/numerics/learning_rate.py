"""The learning rate of every update: a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.schedules import Schedule

__all__ = ["LearningRate", "scale_lr"]

Rule = Literal["linear", "sqrt", "none"]


def scale_lr(base_lr: float, *, global_size: int, reference_size: int | None, rule: Rule) -> float:
    """Scale a learning rate tuned at one batch size to another.

    linear: lr = base_lr * global_size / reference_size; sqrt: the square root of that ratio; none: as it is.

    Args:
        base_lr: peak learning rate tuned at `reference_size`.
        global_size: samples per optimizer step, over all replicas.
        reference_size: samples per optimizer step of the tuning run; None: no scaling.
        rule: how the rate scales with the batch.

    Returns:
        The peak learning rate of this run.

    Raises:
        ConfigError: a size is not positive.

    Example:
        >>> scale_lr(0.1, global_size=1024, reference_size=256, rule="linear")
        0.4

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1; sqrt: Krizhevsky 2014, arXiv:1404.5997, section 5.
    """
    if reference_size is None or rule == "none":
        return base_lr
    if global_size <= 0 or reference_size <= 0:
        key, size = ("lr_scaling.reference_batch", reference_size)
        if global_size <= 0:
            key, size = ("batch.global_size", global_size)
        raise ConfigError([Problem(key=key, value=size, rule="must be positive.")])
    ratio = global_size / reference_size
    return base_lr * (math.sqrt(ratio) if rule == "sqrt" else ratio)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the step: scaled peak, warmup, schedule.

    Update s (from 0) of a warmup of W uses start + (peak - start)(s + 1) / W; the schedule spans the steps that
    remain. It depends on the global batch, never on the number of processes.

    Example:
        >>> from trainkit.numerics.schedules import Constant
        >>> rate = LearningRate(base=0.1, peak=0.4, start=0.1, warmup_steps=2, num_steps=4, schedule=Constant())
        >>> [rate(step) for step in range(4)]
        [0.25, 0.4, 0.4, 0.4]

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warmup).
    """

    base: float
    """The rate in the config."""
    peak: float
    """The rate after scaling, reached at the end of warmup."""
    start: float
    """The rate at the start of warmup."""
    warmup_steps: int
    """Updates of warmup."""
    num_steps: int
    """Updates of the whole training."""
    schedule: Schedule
    """The factor on the peak over the steps after warmup."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of update `step`, from 0."""
        if step < self.warmup_steps:
            share = (step + 1) / self.warmup_steps
            # Not start + (peak - start) * share: that misses the peak by a rounding at share = 1.
            return self.start * (1.0 - share) + self.peak * share
        return self.peak * self.schedule(step - self.warmup_steps, self.num_steps - self.warmup_steps)

    def factor(self, step: int) -> float:
        """Return the rate of update `step` over the base rate: the factor on every parameter group's own rate."""
        return self(step) / self.base if self.base else 0.0
