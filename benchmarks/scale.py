"""Hold `trainkit scale` to measurements: its steps to random shards and a spare, and the knee to this machine.

    python benchmarks/scale.py [--rounds 2] [--num-steps 40] [--only spares|knee]

Spares: trainings with four workers of a parameter server, whose layer sleeps for a tenth of a second a shard, which any
machine can do four times at once: always, or on average by a random time; with and without a spare. A run's time per
step is the mean of its logged windows. The model knows the spread of the sleeping, and the seconds of an update, which
the run with equal workers takes beyond the sleeping.

The knee: 1, 2, 3 and 4 replicas are measured; the knee of the measurement stands beside the one that the model predicts
from one replica, and from one and two.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch import Tensor, nn

from benchmarks import report
from benchmarks.pair import WORKLOADS
from benchmarks.stragglers import SHARD_S, train
from trainkit.scaling.model import slowest_of

SPREAD: Final = 0.5
RANDOM: Final = {
    "equal": (("model.slower=1",), 0.0, 0),
    "random": (("model=jitter",), SPREAD, 0),
    "random, a spare, replace": (
        ("model=jitter", "strategy.spare_replicas=1", "strategy.spare_mode=replace", "batch.global_size=24"), SPREAD, 1,
    ),
}  # fmt: skip
"""Setting -> the overrides of its run, the spread of its shards, and its spares."""
TRAININGS: Final = {
    "MLP of 2 x 1024 on digits, batch 512": ("batch.global_size=512", "model.hidden=[1024,1024]"),
    "convnet, batch 128": WORKLOADS["convnet"].overrides,
    "MLP of 128 on digits, batch 64": (),
}
COUNTS: Final = (2, 3, 4)


class Jitter(nn.Linear):
    """A layer that sleeps for a random time, lognormal with a mean of a tenth of a second."""

    def __init__(self, *, spread: float) -> None:
        super().__init__(4, 2)
        variance = math.log1p(spread**2)
        generator = random.Random(random.SystemRandom().getrandbits(32))
        location = math.log(SHARD_S) - variance / 2
        self._times = iter([generator.lognormvariate(location, math.sqrt(variance)) for _ in range(100_000)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute a shard."""
        time.sleep(next(self._times))
        return super().forward(inputs)


def spares(rounds: int, num_steps: int) -> str:
    """Return the table of measured and predicted steps."""
    rows = []
    update_s = 0.0
    for name, (overrides, spread, spares) in RANDOM.items():
        measured = [train(overrides, num_steps)[0] for _ in range(rounds)]
        middle = statistics.median(measured)
        if name == "equal":
            update_s = max(middle - SHARD_S, 0.0)
        predicted = SHARD_S * slowest_of(4, spread, spares=spares) + update_s
        least_to_most = f"{min(measured):.3f} to {max(measured):.3f}"
        rows.append([name, f"{middle:.3f}", least_to_most, f"{predicted:.3f}", _error(name, predicted / middle - 1)])
        print(f"{name}: measured {middle:.3f} s, predicted {predicted:.3f} s", file=sys.stderr, flush=True)
    return report.table(["4 workers", "s a step", "least to most", "predicted", "error"], rows)


def _error(name: str, error: float) -> str:
    return "calibration" if name == "equal" else f"**{error:+.0%}**"


def knees(rounds: int) -> str:
    """Return the table of measured and predicted knees."""
    rows = [_knee(name, overrides, rounds) for name, overrides in TRAININGS.items()]
    head = ["training", "speed-up of 2, 3, 4", "predicted from 1", "knee", "knee predicted from 1", "from 1 and 2"]
    return report.table(head, rows)


def _knee(name: str, overrides: Sequence[str], rounds: int) -> list[str]:
    import trainkit
    from trainkit.config.check import checked
    from trainkit.measuring.replicas import measure, scalable, workload
    from trainkit.scaling.answers import knee, knee_of
    from trainkit.scaling.fit import fit
    from trainkit.scaling.model import Link, predictions

    os.environ.pop("OMP_NUM_THREADS", None)
    arguments = ["strategy=mirrored", *(override for override in overrides if not override.startswith("strategy"))]
    training = scalable(checked(trainkit.compose(arguments)).cfg)
    log = partial(print, file=sys.stderr, flush=True)
    measurement = measure(training, 4, rounds=rounds, counts=COUNTS, log=log)
    if measurement.failures:
        raise SystemExit("\n".join(measurement.failures))
    shard_s = measurement.shares[1].step_s
    assert shard_s is not None
    points = measurement.points(grows=False)
    rates = [(1, 1.0), *((point.replicas, shard_s.median / point.step_s) for point in points)]
    work = workload(training, measurement, within=Link(bandwidth=2e9, latency_s=1e-4))
    alone, two = fit(work, []), fit(work, [point for point in points if point.replicas == 2])
    guessed = [item.speedup for item in predictions(alone.work, alone.draw, COUNTS)]
    return [
        name,
        ", ".join(f"{rate:.2f}" for _, rate in rates[1:]),
        ", ".join(f"{item.middle:.2f} ({item.low:.2f} to {item.high:.2f})" for item in guessed),
        f"**{knee(rates)}**",
        f"**{knee_of(alone.work, 4)}**",
        f"**{knee_of(two.work, 4)}**",
    ]


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--only", choices=("spares", "knee"))
    options = parser.parse_args()
    parts = []
    if options.only != "knee":
        text = f"## Spares\n\nA shard sleeps {SHARD_S} s, random ones with a spread of {SPREAD}.\n\n"
        parts.append(text + spares(options.rounds, options.num_steps))
    if options.only != "spares":
        parts.append(f"## The knee\n\n{knees(options.rounds)}")
    if options.only:
        print("\n\n".join(parts))
        return
    report.write(
        "scale",
        "Predictions of trainkit scale beside measurements",
        f"python benchmarks/scale.py --rounds {options.rounds} --num-steps {options.num_steps}",
        "\n\n".join(parts),
    )


if __name__ == "__main__":
    main()
