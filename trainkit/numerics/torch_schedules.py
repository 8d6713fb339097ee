"""Schedules of `torch.optim.lr_scheduler`, as functions of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.schedules import Schedule

_MOMENTUM = 0.0625
"""A value that no scheduler gives to the momentum."""


@dataclass(frozen=True, kw_only=True)
class TorchSchedule:
    """The rates that a scheduler of torch gives to an optimizer with one group, by a run of it without a training.

    Its `step` is called once after every update, and its settings (`T_max`, `step_size`, `milestones`, `total_steps`)
    count updates after the warmup. Its rates (`eta_min`, `max_lr`) are those of `optimizer.lr`; the scaling of the
    learning rate and groups with a rate of their own multiply them.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import StepLR
        >>> schedule = TorchSchedule(name="StepLR", make=partial(StepLR, step_size=2))
        >>> factor = schedule.placed(base=0.5, warmup_steps=0, num_steps=4, steps_per_epoch=4)
        >>> [round(factor(step, 4), 12) for step in range(4)]
        [1.0, 1.0, 0.1, 0.1]
    """

    name: str
    """The class, for messages."""
    make: Callable[[torch.optim.Optimizer], LRScheduler]
    """Returns the scheduler of an optimizer."""

    def placed(self, *, base: float, warmup_steps: int, num_steps: int, steps_per_epoch: int) -> Schedule:  # noqa: ARG002 - the signature of every placed schedule
        """Return the factor of every step after the warmup; costs some microseconds a step.

        Raises:
            ConfigError: the scheduler refuses its settings or the number of steps, or changes more than the rate.
        """
        rates = [self._rates(base, max(num_steps - warmup_steps, 1))]
        rates.append(self._rates(base, min(len(rates[0]), 100)))
        if rates[0][: len(rates[1])] != rates[1]:
            raise self._problem("is not a function of the step: two runs of it give other rates.")
        return lambda step, num_steps: rates[0][min(step, len(rates[0]) - 1)] / base  # noqa: ARG005 - the same

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of a step without warmup, for a peak of 1."""
        return self.placed(base=1.0, warmup_steps=0, num_steps=num_steps, steps_per_epoch=1)(step, num_steps)

    def _rates(self, base: float, count: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=base, momentum=_MOMENTUM)
        (group,) = optimizer.param_groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedulers of schedulers call what torch itself warns about
            try:
                scheduler = self.make(optimizer)
                rates = [float(group["lr"])]
                optimizer.step()
                while len(rates) < count:
                    scheduler.step()
                    rates.append(float(group["lr"]))
            except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError, IndexError) as error:
                raise self._problem(f"cannot give the rates of {count:,} steps after the warmup: {error}") from error
        if group["momentum"] != _MOMENTUM:
            rule = "also changes the momentum, and a schedule changes the rate only. Add schedule.cycle_momentum=false."
            raise self._problem(rule)
        return rates

    def _problem(self, rule: str) -> ConfigError:
        return ConfigError([Problem(key="schedule._target_", value=self.name, rule=rule)])
