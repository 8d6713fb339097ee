"""The distribution of the seconds that a replica computes for a step, and the mean of its order statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Form = Literal["lognormal", "normal", "exponential", "constant"]
Floats = NDArray[np.float64]

_NODES: Final = 4000
"""Points of the quadrature of an order statistic; its error is below 1e-4 of the mean up to 100,000 replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Distribution of the seconds of one replica's forward and backward pass of a step.

    Example:
        >>> times = StepTimes(mean_s=0.2, spread=0.1)
        >>> round(times.order_statistic(64, 64), 3)  # the slowest of 64
        0.252
        >>> round(times.order_statistic(62, 64), 3)  # without waiting for the last two
        0.237
    """

    mean_s: float
    spread: float = 0.0
    """Standard deviation divided by the mean; ignored for an exponential, which has 1."""
    form: Form = "lognormal"

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` independent values: (count,) float64, seconds. A normal is cut off at zero."""
        match self.form:
            case "exponential":
                return rng.exponential(self.mean_s, count)
            case "normal":
                return np.maximum(rng.normal(self.mean_s, self.mean_s * self.spread, count), 0.0)
            case "lognormal" if self.spread > 0:
                location, scale = self._logarithmic()
                return rng.lognormal(location, scale, count)
            case _:
                return np.full(count, self.mean_s)

    def scaled(self, factor: float) -> StepTimes:
        """Return the distribution of all times multiplied by a factor."""
        return replace(self, mean_s=self.mean_s * factor)

    def order_statistic(self, rank: int, count: int) -> float:
        """Return the mean of the `rank`-th smallest of `count` independent values, in seconds.

        E[X(k:n)] = n!/((k-1)!(n-k)!) * integral of Q(u) u^(k-1) (1-u)^(n-k) du, with Q the quantile function.

        Source: David and Nagaraja 2003, Order Statistics, section 3.1.
        """
        if not 1 <= rank <= count:
            raise ValueError(f"rank must be 1 to {count}, and is {rank}")
        if self.form == "constant" or (self.form != "exponential" and self.spread == 0):
            return self.mean_s
        if self.form == "exponential":
            return self.mean_s * math.fsum(1 / (count - place) for place in range(rank))
        scores, weights = _order_weights(rank, count)
        if self.form == "normal":
            return float(self.mean_s * (1 + self.spread * (weights @ scores)))
        location, scale = self._logarithmic()
        return float(weights @ np.exp(location + scale * scores))

    def slowest(self, count: int) -> float:
        """Return the mean of the largest of `count` values, in seconds."""
        return self.order_statistic(count, count)

    def _logarithmic(self) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm."""
        variance = math.log1p(self.spread**2)
        return math.log(self.mean_s) - variance / 2, math.sqrt(variance)


@lru_cache(maxsize=4096)
def _order_weights(rank: int, count: int) -> tuple[Floats, Floats]:
    """Return standard normal scores and the probability of each for an order statistic: (nodes,) each, sum 1."""
    # The density of Q(U) for U ~ Beta(k, n-k+1), on an even grid of scores: phi(z) Phi(z)^(k-1) (1-Phi(z))^(n-k).
    scores, log_below, log_above = _grid()
    density = (rank - 1) * log_below + (count - rank) * log_above - scores**2 / 2
    weights = np.exp(density - density.max())
    return scores, weights / weights.sum()


@lru_cache(maxsize=1)
def _grid() -> tuple[Floats, Floats, Floats]:
    """Return scores, log Phi and log (1 - Phi): (nodes,) each. Below -9 and above 9 lies 1e-19."""
    scores = np.linspace(-9.0, 9.0, _NODES)
    normal = NormalDist()
    log_below = np.log([max(normal.cdf(float(score)), 1e-300) for score in scores])
    return scores, log_below, log_below[::-1]
