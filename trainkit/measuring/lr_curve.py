"""Read the curve of a learning-rate range test: smooth the loss, and find the rates that it suggests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WIDTH: Final = 0.02
"""Standard deviation of the smoothing, as a share of the points; at least one point."""
FEWEST_POINTS: Final = 10
"""Minimum number of points for a suggestion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatePoint:
    """One step of the test."""

    lr: float
    """The learning rate of the step."""
    loss: float
    """The loss of the step, before its update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrCurve:
    """The loss over an exponentially growing learning rate, and the rates that it suggests.

    Example:
        >>> falling = [RatePoint(lr=10.0 ** (k / 10 - 4), loss=2 - math.tanh((k - 20) / 5)) for k in range(40)]
        >>> curve = LrCurve.of([*falling, *(RatePoint(lr=k * 1.0, loss=k * 9.0) for k in (1, 2))])
        >>> curve.steepest, curve.tenth_of_minimum
        (0.01, 0.0398)

    Source: Smith 2015, arXiv:1506.01186, section 3.3 (the range test).
    """

    points: tuple[RatePoint, ...]
    """The steps, in their order."""
    smoothed: tuple[float, ...]
    """The loss of each step as the weighted mean of its neighbours on both sides."""
    steepest: float | None
    """The rate at which the smoothed loss falls fastest over the rate's logarithm; None: the loss does not fall."""
    minimum: float | None
    """The rate with the least smoothed loss; None: the loss does not fall."""

    @property
    def tenth_of_minimum(self) -> float | None:
        """A tenth of the rate with the least loss."""
        return None if self.minimum is None else rounded(self.minimum / 10)

    @classmethod
    def of(cls, points: Sequence[RatePoint]) -> LrCurve:
        """Return the curve of the steps of a test, whose losses are finite.

        The loss counts as falling if its least smoothed value is below the first one by more than the noise: the
        standard deviation of the losses around the smoothed ones, up to the least.
        """
        if not points:
            return cls(points=(), smoothed=(), steepest=None, minimum=None)
        losses = np.array([point.loss for point in points], dtype=np.float64)
        smoothed = _smoothed(losses)
        least = int(np.argmin(smoothed))
        found = cls(points=tuple(points), smoothed=tuple(smoothed.tolist()), steepest=None, minimum=None)
        if len(points) < FEWEST_POINTS or least < 2:
            return found
        noise = float(np.std(losses[: least + 1] - smoothed[: least + 1]))
        if smoothed[0] - smoothed[least] <= noise:
            return found
        logs = np.log([point.lr for point in points])
        place = int(np.argmin(np.gradient(smoothed, logs)[:least]))
        return cls(
            points=found.points,
            smoothed=found.smoothed,
            steepest=rounded(points[place].lr),
            minimum=rounded(points[least].lr),
        )


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each value and its neighbours weighted by a normal distribution."""
    width = max(1.0, _WIDTH * len(values))
    reach = math.ceil(3 * width)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums = np.convolve(values, weights)[reach : reach + len(values)]
    counts = np.convolve(np.ones(len(values)), weights)[reach : reach + len(values)]
    return np.asarray(sums / counts, dtype=np.float64)


def rounded(rate: float) -> float:
    """Return a rate with three digits.

    Example:
        >>> rounded(0.00316227)
        0.00316
    """
    return float(f"{rate:.3g}")


@dataclass
class Divergence:
    """Detects when the loss of a range test diverges.

    The loss is averaged over the last steps (weights 0.2, 0.16, 0.128 ...). The test has diverged once the average
    exceeds its first value and min + 3 * |min|: for a positive loss, four times the minimum.

    Example:
        >>> seen = Divergence()
        >>> [seen.add(loss) for loss in (2.0, 1.0, 1.0, 9.0, 90.0)]
        [False, False, False, False, True]
    """

    _sum: float = 0.0
    _weight: float = 0.0
    _first: float | None = None
    _least: float = math.inf

    def add(self, loss: float) -> bool:
        """Add the loss of a step, and return whether the losses have diverged."""
        self._sum, self._weight = 0.8 * self._sum + 0.2 * loss, 0.8 * self._weight + 0.2
        mean = self._sum / self._weight
        self._first = mean if self._first is None else self._first
        self._least = min(self._least, mean)
        return mean > max(self._first, self._least + 3 * abs(self._least))
