"""Simulate kills, restarts and checkpoints of a training that restarts as a whole."""

from __future__ import annotations

import numpy as np

from trainkit.scaling.closed_forms import Interruptions


def simulate_goodput(interval_s: float, stops: Interruptions, *, failures: int = 4000, seed: int = 0) -> float:
    """Return the share of time that advances the training.

    The run computes for `interval_s`, then writes a checkpoint. A failure loses what is not in a complete checkpoint,
    and costs a restart, in which the next failure may come.

    Example:
        >>> round(simulate_goodput(3266.0, Interruptions(write_s=30.0, restart_s=300.0, mtbf_s=180_000.0)), 2)
        0.98
    """
    rng = np.random.default_rng(seed)
    useful_s = elapsed_s = 0.0
    for _ in range(failures):
        alive_s = float(rng.exponential(stops.mtbf_s))
        useful_s += alive_s // (interval_s + stops.write_s) * interval_s
        elapsed_s += alive_s
        while (again_s := float(rng.exponential(stops.mtbf_s))) < stops.restart_s:
            elapsed_s += again_s
        elapsed_s += stops.restart_s
    return useful_s / elapsed_s
