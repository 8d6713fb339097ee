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
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainkit.scaling.model import Draw, Interval, Link, Workload, predict, predictions

_FACTORS: Final = tuple(3.0 ** (power / 3) for power in range(-7, 8))
"""Factors of the assumed bandwidth and latency: 1/13 to 13."""
_OVERLAPS: Final = (0.0, 0.15, 0.3, 0.45, 0.6)
_CROWDS: Final = (1.0, 1.08, 1.17, 1.26, 1.36, 1.47)
_SIGMAS: Final = np.asarray([math.log(3), math.log(3), math.inf, 0.15])
"""Standard deviations of the prior: of the logarithms of the factors, of the overlap (any is as probable), and of the
logarithm of the slowdown.
"""
UNSURE: Final = 0.3
"""Relative uncertainty of a quantity that is assumed and not measured, such as the bandwidth between hosts."""
_NOISE: Final = 0.05
"""Relative noise of a measured step that the model need not explain."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured number of replicas."""

    replicas: int
    step_s: float
    """Median seconds of a step."""
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured number of replicas, and its prediction from the smaller ones."""

    replicas: int
    """Replicas that were measured together."""
    predicted_s: Interval
    """Predicted seconds of a step."""
    measured_s: float
    """Measured seconds of a step, the median."""
    error: float
    """Relative error of the prediction."""
    inside: bool
    """Whether the measurement lies in the predicted interval."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The model of a training, and the workloads that the measurements or assumptions allow."""

    work: Workload
    """The most probable workload."""
    draw: Draw
    checks: tuple[Check, ...] = ()

    def on_hosts(self, per_host: int | None, between: Link) -> Fit:
        """Return the fit for replicas of several hosts, which measurements on this host do not cover."""

        def draw(rng: np.random.Generator) -> Workload:
            drawn = self.draw(rng)
            bandwidth = between.bandwidth * math.exp(rng.normal(0.0, UNSURE))
            return replace(drawn, per_host=per_host, between=replace(between, bandwidth=bandwidth))

        return replace(self, work=replace(self.work, per_host=per_host, between=between), draw=draw)


def fit(work: Workload, points: Sequence[Point], *, computing: float = 0.03) -> Fit:
    """Fit the open quantities to measured steps.

    Args:
        work: measurement of one replica, with assumed links.
        points: measured numbers of replicas above 1, in any order.
        computing: relative uncertainty of the measurement of one replica.
    """
    ordered = sorted(points, key=lambda point: point.replicas)
    grid = np.asarray(list(itertools.product(np.log(_FACTORS), np.log(_FACTORS[1::3]), _OVERLAPS, np.log(_CROWDS))))
    works = [_changed(work, values) for values in grid]
    scores = -((grid / _SIGMAS) ** 2).sum(axis=1) / 2

    def fitted(misfit: float = 0.0) -> Fit:
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()

        def draw(rng: np.random.Generator) -> Workload:
            chosen = works[int(rng.choice(len(works), p=weights))]
            return replace(
                chosen,
                share_s={
                    count: value * math.exp(rng.normal(0.0, computing)) for count, value in chosen.share_s.items()
                },
                missing=math.exp(rng.normal(0.0, misfit)),
                spread=chosen.spread * float(rng.uniform(0.5, 1.5)),
            )

        return Fit(work=_changed(work, weights @ grid), draw=draw)

    latest, checks = fitted(), []
    for point in ordered:
        checks.append(_check(latest, point))
        noise = max(_NOISE, math.log(max(point.high_s / point.low_s, 1.0)) / 2)
        times = np.asarray([predict(candidate, point.replicas).total_s for candidate in works])
        scores = scores - (np.log(times / point.step_s) / noise) ** 2 / 2
        latest = fitted()
    # The relative error of the model at the measured numbers of replicas, beyond the noise.
    errors = [math.log(predict(latest.work, point.replicas).total_s / point.step_s) for point in ordered]
    misfit = math.sqrt(math.fsum(max(abs(error) - _NOISE, 0.0) ** 2 for error in errors) / max(len(errors), 1))
    return replace(fitted(misfit), checks=tuple(checks))


def _changed(work: Workload, values: NDArray[np.float64]) -> Workload:
    """Return the workload with the logarithms of two factors of its link, an overlap, and that of a slowdown."""
    bandwidth, latency, overlap, crowd = values.tolist()
    within = Link(
        bandwidth=work.within.bandwidth * math.exp(bandwidth), latency_s=work.within.latency_s * math.exp(latency)
    )
    return replace(work, within=within, overlap=overlap, crowd=math.exp(crowd))


def _check(fitted: Fit, point: Point) -> Check:
    (predicted,) = predictions(fitted.work, fitted.draw, (point.replicas,))
    samples, rates = predicted.samples_per_s.middle * predicted.step_s, predicted.samples_per_s
    seconds = Interval(low=samples / rates.high, middle=predicted.step_s, high=samples / rates.low)
    return Check(
        replicas=point.replicas,
        predicted_s=seconds,
        measured_s=point.step_s,
        error=predicted.step_s / point.step_s - 1,
        inside=seconds.contains(point.step_s),
    )
