"""Hold `trainkit scale` to measurements: the simulator to stragglers and spares, and the knee to this machine.

    python benchmarks/scale.py [--rounds 2] [--num-steps 40] [--only simulator|knee]

The simulator: trainings with four workers of a parameter server, whose layer sleeps for a tenth of a second a shard,
which any machine can do four times at once: equal, one of them five times slower, or by a random time; with and without
a spare. A run's time per step is the mean of its logged windows. The simulator knows the distribution of the sleeping,
and the seconds of an update, which the run with equal workers takes beyond the sleeping.

The knee: 1, 2, 3 and 4 replicas are measured; the knee of the measurement stands beside the one that the model predicts
from one replica, and from one and two.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch import Tensor, nn

from benchmarks import report
from benchmarks.pair import WORKLOADS
from benchmarks.stragglers import SHARD_S, SLOWER, train
from trainkit.scaling.distributions import StepTimes
from trainkit.scaling.simulation import Scene, simulate

SPREAD: Final = 0.5
EQUAL: Final = StepTimes(mean_s=SHARD_S, form="constant")
RANDOM: Final = StepTimes(mean_s=SHARD_S, spread=SPREAD)
_SPARE: Final = "strategy.spare_replicas=1"
SIMULATED: Final = {
    "equal": (("model.slower=1",), Scene(workers=4, compute=EQUAL)),
    "one 5 x slower": ((), Scene(workers=4, compute=EQUAL, slow_workers=1, slow_factor=SLOWER)),
    "one 5 x slower, a spare, duplicate": (
        (_SPARE,),
        Scene(workers=4, shards=4, compute=EQUAL, slow_workers=1, slow_factor=SLOWER, spares=1, late="duplicate"),
    ),
    "one 5 x slower, a spare, replace": (
        (_SPARE, "strategy.spare_mode=replace"),
        Scene(workers=4, shards=4, compute=EQUAL, slow_workers=1, slow_factor=SLOWER, spares=1),
    ),
    "random": (("model=jitter",), Scene(workers=4, compute=RANDOM)),
    "random, a spare, replace": (
        ("model=jitter", _SPARE, "strategy.spare_mode=replace", "batch.global_size=24"),
        Scene(workers=4, shards=3, compute=RANDOM, spares=1),
    ),
}
"""Setting -> the overrides of its run, and what is simulated."""
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
        times = StepTimes(mean_s=SHARD_S, spread=spread)
        import numpy as np

        rng = np.random.default_rng(random.SystemRandom().getrandbits(32))
        self._times = iter(times.draw(rng, 100_000).tolist())

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute a shard."""
        time.sleep(next(self._times))
        return super().forward(inputs)


def simulator(rounds: int, num_steps: int) -> str:
    """Return the table of measured and simulated steps."""
    rows = []
    update_s = 0.0
    for name, (overrides, scene) in SIMULATED.items():
        measured = [train(overrides, num_steps)[0] for _ in range(rounds)]
        middle = statistics.median(measured)
        if name == "equal":
            update_s = max(middle - SHARD_S, 0.0)
        predicted = simulate(replace(scene, update_s=update_s), updates=2000).mean_s
        spread = f"{min(measured):.3f} to {max(measured):.3f}"
        rows.append([name, f"{middle:.3f}", spread, f"{predicted:.3f}", _error(name, predicted / middle - 1)])
        print(f"{name}: measured {middle:.3f} s, simulated {predicted:.3f} s", file=sys.stderr, flush=True)
    return report.table(["4 workers", "s a step", "least to most", "simulated", "error"], rows)


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
    arguments = ["strategy=mirrored", *(one for one in overrides if not one.startswith("strategy"))]
    what = scalable(checked(trainkit.compose(arguments)).cfg)
    found = measure(what, 4, rounds=rounds, counts=COUNTS, log=lambda line: print(line, file=sys.stderr, flush=True))
    if found.failures:
        raise SystemExit("\n".join(found.failures))
    one = found.shares[1].step_s
    assert one is not None
    points = found.points(grows=False)
    rates = [(1, 1.0), *((point.replicas, one.median / point.step_s) for point in points)]
    work = workload(what, found, within=Link(bandwidth=2e9, latency_s=1e-4))
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
    parser.add_argument("--only", choices=("simulator", "knee"))
    options = parser.parse_args()
    parts = []
    if options.only != "knee":
        text = f"## The simulator\n\nA shard sleeps {SHARD_S} s, random ones with a spread of {SPREAD}.\n\n"
        parts.append(text + simulator(options.rounds, options.num_steps))
    if options.only != "simulator":
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
