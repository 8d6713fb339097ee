"""Fit the model to measured steps, check it by predicting the next one, and quantify the remaining uncertainty.

The measurement of one replica determines the computing. The unknowns have a prior: the speed of the link and the
seconds of a message (within a factor of three), the hidden share of the exchange, and the slowdown of replicas on one
host. A grid over the four is weighted by how well each point explains the measured steps of 2 and 4 replicas (Bayes);
its mean is the model, and its points drawn by their weights give the intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from trainkit.scaling.model import Interval, Link, Workload, predict, predictions

_FACTORS: Final = tuple(3.0 ** (place / 3) for place in range(-7, 8))
"""Factors of the assumed bandwidth and latency: 1/13 to 13."""
_FACTOR_SIGMA: Final = math.log(3)
_OVERLAPS: Final = (0.0, 0.15, 0.3, 0.45, 0.6)
_CROWDS: Final = (1.0, 1.08, 1.17, 1.26, 1.36, 1.47)
_CROWD_SIGMA: Final = 0.15
_BETWEEN_SIGMA: Final = 0.3
"""Relative uncertainty of the bandwidth between hosts, which is not measured."""
_NOISE: Final = 0.05
"""Relative noise of a measured step that the model need not explain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A measured number of replicas."""

    replicas: int
    step_s: float
    """Median seconds of a step."""
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A measurement, and its prediction from only the smaller numbers of replicas."""

    replicas: int
    predicted_s: Interval
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s.middle / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the predicted interval."""
        return self.predicted_s.contains(self.measured_s)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fitted model, and all workloads that the measurements allow."""

    work: Workload
    """The mean workload."""
    others: tuple[Workload, ...]
    weights: tuple[float, ...]
    """Probability of each of the others."""
    computing: float
    """Relative uncertainty of the computing of one replica."""
    misfit: float = 0.0
    """Relative error of the model at the measured numbers of replicas, beyond the noise."""
    checks: tuple[Check, ...] = field(default=())

    def on_hosts(self, per_host: int | None, between: Link) -> Fit:
        """Return the fit for replicas of several hosts, which measurements on this host do not cover."""

        def placed(one: Workload) -> Workload:
            return replace(one, per_host=per_host, between=between)

        return replace(self, work=placed(self.work), others=tuple(map(placed, self.others)))

    def draw(self, rng: np.random.Generator) -> Workload:
        """Draw one of the workloads that the measurements allow."""
        chosen = self.others[int(rng.choice(len(self.others), p=self.weights))]
        shares = {count: value * math.exp(rng.normal(0.0, self.computing)) for count, value in chosen.share_s.items()}
        missing = math.exp(rng.normal(0.0, self.misfit))
        spread = chosen.spread * float(rng.uniform(0.5, 1.5))
        bandwidth = chosen.between.bandwidth * math.exp(rng.normal(0.0, _BETWEEN_SIGMA))
        between = replace(chosen.between, bandwidth=bandwidth)
        return replace(chosen, share_s=shares, spread=spread, between=between, missing=missing)


def fit(work: Workload, points: Sequence[Point], *, computing: float = 0.03) -> Fit:
    """Fit the open quantities to measured steps.

    Args:
        work: measurement of one replica, with assumed links.
        points: measured numbers of replicas above 1, in any order.
        computing: relative uncertainty of the measurement of one replica.
    """
    ordered = sorted(points, key=lambda point: point.replicas)
    grid = [(_changed(work, *values), _log_prior(*values)) for values in _grid()]
    scores = np.asarray([prior for _, prior in grid])
    found = _fitted(work, grid, scores, computing)
    checks = []
    for point in ordered:
        checks.append(_check(found, point))
        scores = scores + np.asarray([_log_likelihood(one, point) for one, _ in grid])
        found = _fitted(work, grid, scores, computing)
    errors = [math.log(predict(found.work, point.replicas).total_s / point.step_s) for point in ordered]
    misfit = math.sqrt(math.fsum(max(abs(one) - _NOISE, 0.0) ** 2 for one in errors) / max(len(errors), 1))
    return replace(found, misfit=misfit, checks=tuple(checks))


def _grid() -> list[tuple[float, float, float, float]]:
    return list(itertools.product(_FACTORS, _FACTORS[1::3], _OVERLAPS, _CROWDS))


def _changed(work: Workload, bandwidth: float, latency: float, overlap: float, crowd: float) -> Workload:
    within = Link(bandwidth=work.within.bandwidth * bandwidth, latency_s=work.within.latency_s * latency)
    return replace(work, within=within, overlap=overlap, crowd=crowd)


def _log_prior(bandwidth: float, latency: float, overlap: float, crowd: float) -> float:
    del overlap  # all are equally probable
    squares = (math.log(bandwidth) / _FACTOR_SIGMA) ** 2 + (math.log(latency) / _FACTOR_SIGMA) ** 2
    return -(squares + (math.log(crowd) / _CROWD_SIGMA) ** 2) / 2


def _log_likelihood(work: Workload, point: Point) -> float:
    noise = max(_NOISE, math.log(max(point.high_s / point.low_s, 1.0)) / 2)
    return float(-((math.log(predict(work, point.replicas).total_s / point.step_s) / noise) ** 2) / 2)


def _fitted(
    work: Workload,
    grid: Sequence[tuple[Workload, float]],
    scores: np.ndarray[tuple[int], np.dtype[np.float64]],
    computing: float,
) -> Fit:
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    others = tuple(one for one, _ in grid)
    mean = _mean(work, others, weights.tolist())
    return Fit(work=mean, others=others, weights=tuple(weights.tolist()), computing=computing)


def _mean(work: Workload, others: Sequence[Workload], weights: Sequence[float]) -> Workload:
    """Return the workload of the weighted means; factors are averaged by their logarithms."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True))

    bandwidth = math.exp(mean([math.log(one.within.bandwidth / work.within.bandwidth) for one in others]))
    known = work.within.latency_s > 0
    latency = (
        math.exp(mean([math.log(one.within.latency_s / work.within.latency_s) for one in others])) if known else 1.0
    )
    crowd = math.exp(mean([math.log(one.crowd) for one in others]))
    return _changed(work, bandwidth, latency, mean([one.overlap for one in others]), crowd)


def _check(found: Fit, point: Point) -> Check:
    predicted = predictions(found.work, found.draw, (point.replicas,))[0]
    samples = found.work.samples * (point.replicas if found.work.grows else 1)
    rates = predicted.samples_per_s
    seconds = Interval(low=samples / rates.high, middle=samples / rates.middle, high=samples / rates.low)
    return Check(replicas=point.replicas, predicted_s=seconds, measured_s=point.step_s)
