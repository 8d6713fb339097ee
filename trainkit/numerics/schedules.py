"""Learning-rate schedules: pure functions of the progress after warmup.

Every schedule is called with `(step, num_steps)`, step from 0 and num_steps the steps that remain after warmup, and
returns the factor on the peak learning rate: 1 at the peak. `num_steps` fixes its length, so that stopping early or
resuming does not change the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Constant", "Cosine", "InverseSqrt", "Linear", "Schedule", "Step", "WarmupStableDecay"]


class Schedule(Protocol):
    """A factor on the peak learning rate."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of update `step` (from 0) of the `num_steps` after warmup."""
        ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak, throughout.

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

    end: float = 0.0
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

    end: float = 0.0
    """Factor where the curve would arrive after the last step."""

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of this step."""
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * step / max(num_steps, 1)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """Multiply by `gamma` at each milestone, a share of the steps after warmup.

    Example:
        >>> [Step(milestones=(0.5,), gamma=0.1)(step, 4) for step in range(4)]
        [1.0, 1.0, 0.1, 0.1]
    """

    milestones: tuple[float, ...] = (0.5, 0.75)
    """Shares of the steps after warmup, increasing, each between 0 and 1."""
    gamma: float = 0.1
    """Factor at each milestone."""

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

    timescale: int = 1000
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

    decay: float = 0.1
    """Share of the steps after warmup that decay, between 0 and 1."""
    shape: Literal["linear", "sqrt"] = "linear"
    """linear: 1 - x; sqrt: 1 - sqrt(x), x the share of the decay that is behind."""
    end: float = 0.0
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
