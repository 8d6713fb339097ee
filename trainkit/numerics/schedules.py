"""The learning rate of every update: a pure function of the step, with a schedule after warmup.

Every schedule is called with `(step, num_steps)`, step from 0 and num_steps the steps that remain after warmup, and
returns the factor on the peak learning rate: 1 at the peak. `num_steps` fixes its length, so that stopping early or
resuming does not change the curve.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, runtime_checkable

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, maths, unit, within

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Schedule(Protocol):
    """A factor on the peak learning rate."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of update `step` (from 0) of the `num_steps` after warmup."""
        ...


@runtime_checkable
class NeedsRun(Protocol):
    """A schedule that needs more than the number of steps after the warmup, such as the length of an epoch."""

    def placed(self, *, base: float, warmup_steps: int, num_steps: int, steps_per_epoch: int) -> Schedule:
        """Return the schedule of a run.

        Args:
            base: the learning rate in the config.
            warmup_steps: updates of the warmup.
            num_steps: updates of the whole training, with the warmup.
            steps_per_epoch: updates of one epoch.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak in every step.

    Example:
        >>> Constant()(7, 10)
        1.0
    """

    def __call__(self, step: int, num_steps: int) -> float:  # noqa: ARG002 - the signature of every schedule
        """Return 1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A straight line from the peak to `end`: 1 - (1 - end) step / num_steps.

    Example:
        >>> Linear()(5, 10)
        0.5
    """

    end: Annotated[float, at_least(0)] = 0.0
    """Factor where the line would arrive after the last step."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of this step."""
        return 1.0 - (1.0 - self.end) * step / max(num_steps, 1)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the peak to `end`: end + (1 - end)(1 + cos(pi step / num_steps)) / 2.

    Example:
        >>> round(Cosine()(5, 10), 12)
        0.5

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, one period.
    """

    end: Annotated[float, at_least(0)] = 0.0
    """Factor where the curve would arrive after the last step."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of this step."""
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * step / max(num_steps, 1)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """Multiply by `gamma` at each milestone: a share of the steps after warmup, or an epoch or step of the training.

    Milestones in epochs or steps count from the start of the training, warmup included, and do not depend on its
    length: the update after `milestones_steps` updates, or after that many epochs, is the first with the lower rate.

    Example:
        >>> [Step(milestones=(0.5,), gamma=0.1)(step, 4) for step in range(4)]
        [1.0, 1.0, 0.1, 0.1]
        >>> in_epochs = Step(milestones_epochs=(1.5,), gamma=0.1)
        >>> factor = in_epochs.placed(base=1.0, warmup_steps=1, num_steps=5, steps_per_epoch=2)
        >>> [factor(step, 4) for step in range(4)]
        [1.0, 1.0, 0.1, 0.1]
    """

    milestones: Annotated[tuple[float, ...], unit("a share, 0 to 1")] = (0.5, 0.75)
    """Shares of the steps after warmup, increasing, each between 0 and 1."""
    gamma: Annotated[float, at_least(0)] = 0.1
    """Factor at each milestone."""
    milestones_epochs: Annotated[tuple[float, ...] | None, maths(neutral=None), unit("epochs")] = None
    """Epochs of the training, increasing, instead of `milestones`."""
    milestones_steps: Annotated[tuple[int, ...] | None, maths(neutral=None), unit("steps")] = None
    """Steps of the training, increasing, instead of `milestones`."""

    def __post_init__(self) -> None:
        """Refuse shares that would never be reached, and several kinds of milestones.

        Raises:
            ConfigError: the milestones are not increasing, or not shares, or are given twice.
        """
        if [*self.milestones] != sorted(self.milestones) or not all(0 <= share <= 1 for share in self.milestones):
            rule = "must be shares of the steps after warmup, increasing, each between 0 and 1."
            rule += " Epochs: schedule.milestones_epochs; steps: schedule.milestones_steps."
            raise ConfigError([Problem(key="schedule.milestones", value=[*self.milestones], rule=rule)])
        both = {"milestones_epochs": self.milestones_epochs, "milestones_steps": self.milestones_steps}
        named = {name: value for name, value in both.items() if value is not None}
        for name, value in named.items():
            if [*value] != sorted(value) or not all(0 < milestone < math.inf for milestone in value):
                rule = "must be increasing, each above 0."
                raise ConfigError([Problem(key=f"schedule.{name}", value=[*value], rule=rule)])
        if len(named) + (self.milestones != (0.5, 0.75)) > 1:
            rule = "Give one of schedule.milestones, schedule.milestones_epochs and schedule.milestones_steps."
            raise ConfigError([Problem(key=f"schedule.{next(iter(named))}", rule=rule)])

    def placed(self, *, base: float, warmup_steps: int, num_steps: int, steps_per_epoch: int) -> Schedule:  # noqa: ARG002 - the signature of every placed schedule
        """Return the schedule of a run.

        Raises:
            ConfigError: a milestone lies within the warmup.
        """
        if self.milestones_epochs is None and self.milestones_steps is None:
            return self
        epochs, steps = self.milestones_epochs or (), self.milestones_steps or ()
        after = [step - warmup_steps for step in (*steps, *(round(epoch * steps_per_epoch) for epoch in epochs))]
        if after and after[0] < 0:
            key = "schedule.milestones_epochs" if epochs else "schedule.milestones_steps"
            rule = f"the first one is step {after[0] + warmup_steps:,}, within the warmup of {warmup_steps:,} steps."
            raise ConfigError([Problem(key=key, value=[*epochs, *steps], rule=rule)])
        return lambda step, num_steps: self.gamma ** sum(step >= milestone for milestone in after)  # noqa: ARG005 - the same

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of this step."""
        return self.gamma ** sum(step >= share * num_steps for share in self.milestones)


@dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Decay as one over the square root: sqrt(timescale / (timescale + step)).

    Example:
        >>> InverseSqrt(timescale=100)(300, 1000)
        0.5

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3, its warmup steps as `timescale`.
    """

    timescale: Annotated[int, at_least(1), unit("steps")] = 1000
    """Steps after which the factor is 1 / sqrt(2)."""

    def __call__(self, step: int, num_steps: int) -> float:  # noqa: ARG002 - the signature of every schedule
        """Return the factor of this step."""
        return math.sqrt(self.timescale / (self.timescale + step))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Stay at the peak, then decay over the last share of the steps.

    Example:
        >>> [round(WarmupStableDecay(decay=0.5)(step, 4), 12) for step in range(4)]
        [1.0, 1.0, 1.0, 0.5]

    Source: Hu et al. 2024, arXiv:2404.06395, section 4.2; the 1 - sqrt form: Hagele et al. 2024, arXiv:2405.18392.
    """

    decay: Annotated[float, within(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of the steps after warmup that decay, between 0 and 1."""
    shape: Literal["linear", "sqrt"] = "linear"
    """linear: 1 - x; sqrt: 1 - sqrt(x), x the completed share of the decay."""
    end: Annotated[float, at_least(0)] = 0.0
    """Factor where the decay would arrive after the last step."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of this step."""
        length = self.decay * num_steps
        behind = step - (num_steps - length)
        if behind <= 0:
            return 1.0
        share = behind / length
        fall = math.sqrt(share) if self.shape == "sqrt" else share
        return 1.0 - (1.0 - self.end) * fall


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
    make: Callable[[Optimizer], LRScheduler]
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
        import torch  # noqa: PLC0415 - the other schedules need no torch

        optimizer = torch.optim.SGD([torch.zeros(())], lr=base, momentum=0.0625)  # no scheduler gives this momentum
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
        if group["momentum"] != 0.0625:
            rule = "also changes the momentum, and a schedule changes the rate only. Add schedule.cycle_momentum=false."
            raise self._problem(rule)
        return rates

    def _problem(self, rule: str) -> ConfigError:
        return ConfigError([Problem(key="schedule._target_", value=self.name, rule=rule)])


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """Grow by the same ratio each step: first^(1 - x) last^x, x the completed share of the steps; then stay.

    The schedule of `trainkit find lr`; `prove --layouts` begins with a rate of 0.

    Example:
        >>> [round(RateRange(first=0.01, last=1.0, steps=3)(step, 100), 12) for step in range(3)]
        [0.01, 0.1, 1.0]
        >>> [RateRange(first=0.0, last=1.0, steps=2)(step, 100) for step in range(3)]
        [0.0, 1.0, 1.0]

    Source: Smith 2015, arXiv:1506.01186, section 3.3, with an exponential instead of a linear growth.
    """

    first: float
    """The factor of step 0."""
    last: float
    """The factor of the last step of the test."""
    steps: Annotated[int, unit("steps")]
    """Steps from the first factor to the last one, both counted; at least 2."""

    def __call__(self, step: int, num_steps: int) -> float:  # noqa: ARG002 - the signature of every schedule
        """Return the factor of a step."""
        share = min(step / (self.steps - 1), 1.0)
        return float(self.first ** (1 - share) * self.last**share)


Rule = Literal["linear", "sqrt", "none"]


def scale_lr(base_lr: float, *, global_size: int, reference_size: int | None, rule: Rule) -> float:
    """Scale a learning rate tuned at one batch size to another.

    linear: lr = base_lr * global_size / reference_size; sqrt: the square root of that ratio; none: unchanged.

    Args:
        base_lr: peak learning rate tuned at `reference_size`.
        global_size: samples per optimizer step, over all replicas.
        reference_size: samples per optimizer step of the tuning run; None: no scaling.
        rule: how the rate scales with the batch.

    Returns:
        The peak learning rate of this run.

    Example:
        >>> scale_lr(0.1, global_size=1024, reference_size=256, rule="linear")
        0.4

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1; sqrt: Krizhevsky 2014, arXiv:1404.5997, section 5.
    """
    if reference_size is None or rule == "none":
        return base_lr
    ratio = global_size / reference_size
    return base_lr * (math.sqrt(ratio) if rule == "sqrt" else ratio)


def unreduced(step: int) -> float:  # noqa: ARG001 - the signature of every reduction
    """Return 1: evaluations do not change the learning rate."""
    return 1.0


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
    reduced: Callable[[int], float] = unreduced
    """Factor of an update by the metrics of evaluations so far; 1 without `callbacks=[plateau]`."""
    length: Callable[[int], int] | None = None
    """Updates of the whole training as estimated before an update, with `stop_after`; None: `num_steps`."""

    def total(self, step: int) -> int:
        """Return the updates of the whole training as known before update `step`; `step` is one of them."""
        return self.num_steps if self.length is None else max(self.length(step), step + 1)

    def __call__(self, step: int) -> float:
        """Return the learning rate of update `step`, from 0."""
        if step < self.warmup_steps:
            share = (step + 1) / self.warmup_steps
            # Not start + (peak - start) * share: that misses the peak by a rounding at share = 1.
            rate = self.start * (1.0 - share) + self.peak * share
        else:
            rate = self.peak * self.schedule(step - self.warmup_steps, self.total(step) - self.warmup_steps)
        return rate * self.reduced(step)

    def factor(self, step: int) -> float:
        """Return the rate of update `step` divided by the base rate: the factor on every parameter group's own rate."""
        return self(step) / self.base if self.base else 0.0


def lr_points(rate: Callable[[int], float], num_steps: int, *, most: int = 600) -> list[tuple[int, float]]:
    """Return the learning rate at evenly spaced steps, including the first and the last.

    Example:
        >>> lr_points(lambda step: 0.5 * step, 4)
        [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    """
    last = num_steps - 1
    count = min(num_steps, most)
    steps = [last * index // max(1, count - 1) for index in range(count)]
    return [(step, rate(step)) for step in steps]
