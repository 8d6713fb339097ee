"""Formulas of the field for links and checkpoints; the simulator is tested against them.

Units: seconds, bytes, bytes per second. Order statistics are in `trainkit.scaling.distributions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Interruptions of a training that restarts as a whole."""

    write_s: float
    """Seconds for which a checkpoint stops it."""
    restart_s: float
    """Seconds from a failure to the next step."""
    mtbf_s: float
    """Mean seconds between two failures of the whole run, which come at random (exponential)."""


def ring_all_reduce_s(replicas: int, num_bytes: float, bandwidth: float, latency_s: float) -> float:
    """Return the seconds of an all-reduce over a ring: 2 (n-1) rounds, each of 1/n of the bytes.

    Example:
        >>> ring_all_reduce_s(4, 1e9, 1e9, 0.0)
        1.5

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """
    rounds = 2 * (replicas - 1)
    return rounds * (num_bytes / replicas / bandwidth + latency_s)


def checkpoint_interval_s(write_s: float, mtbf_s: float) -> float:
    """Return the computing time between two checkpoints that loses the least.

    Args:
        write_s: seconds for which a checkpoint stops the training.
        mtbf_s: mean seconds between two failures of the whole run.

    Example:
        >>> round(checkpoint_interval_s(30.0, 180_000.0))  # half a minute to write, a failure in 50 hours
        3266

    Source: Young 1974, sqrt(2 C M); Daly 2006, A higher order estimate of the optimum checkpoint interval, eq. 37.
    """
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def goodput(interval_s: float, stops: Interruptions) -> float:
    """Return the share of time spent on progress, for a training that writes a checkpoint every `interval_s`.

    Example:
        >>> round(goodput(3266.0, Interruptions(write_s=30.0, restart_s=300.0, mtbf_s=180_000.0)), 4)
        0.9802

    Source: Daly 2006, eq. 20: T = M exp(R/M) (exp((tau + C)/M) - 1) for each interval tau.
    """
    segment = math.expm1((interval_s + stops.write_s) / stops.mtbf_s)
    taken_s = stops.mtbf_s * math.exp(stops.restart_s / stops.mtbf_s) * segment
    return interval_s / taken_s
