"""Measure the cost of a slow worker, and the effect of spares or asynchronous updates.

    python benchmarks/stragglers.py [--rounds 3] [--num-steps 24]

Four workers, of which one is five times slower than the others, at four shards per step. A layer sleeps for a tenth of
a second per shard (half a second on the slow worker), which any machine can do four times at once: the waiting times
are measured, not the speed of this machine. Each setting is a run with the public command; a run's time per step is the
median of its logged windows. The second table is about asynchronous updates: their staleness with four equal workers,
and with the slow one.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn

from benchmarks import report
from trainkit.config.grammar import replacing

SHARD_S, SLOWER, SLOW_RANK = 0.1, 5, "2"
TRAINING = (
    "--config-dir", str(ROOT / "benchmarks" / "conf"), "--allow-package", "benchmarks", "recipe=null", "data=points",
    "model=slow", "optimizer=sgd", "optimizer.lr=0.01", "batch.global_size=32", "batch.micro_size=8",
    "log_every_steps=2", "precision=fp32", "checkpoint.keep_best=0", "strategy=parameter_server",
    "strategy.workers=4", "strategy.servers=1",
)  # fmt: skip
SYNCHRONOUS = {
    "four equal workers": ("model.slower=1",),
    "one 5 x slower": (),
    "the same, one spare, duplicate": ("strategy.spare_replicas=1",),
    "the same, one spare, replace": ("strategy.spare_replicas=1", "strategy.spare_mode=replace"),
}
ASYNCHRONOUS = {
    "four equal workers": ("model.slower=1",),
    "one 5 x slower": (),
}


class Slow(nn.Linear):
    """A layer that sleeps, longer on one rank."""

    def __init__(self, *, slower: int) -> None:
        super().__init__(4, 2)
        self.seconds = SHARD_S * (slower if os.environ.get("TRAINKIT_RANK") == SLOW_RANK else 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute a shard."""
        time.sleep(self.seconds)
        return super().forward(inputs)


class Points:
    """Samples of four numbers each, and a class."""

    splits: ClassVar[tuple[str, ...]] = ("train",)

    def __init__(self, *, num_samples: int, split: str = "train") -> None:
        del split
        self.inputs = torch.sin(torch.arange(num_samples * 4.0)).reshape(num_samples, 4)
        self.targets = (self.inputs[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def train(overrides: tuple[str, ...], num_steps: int) -> tuple[float, dict[str, Any]]:
    """Return seconds per step, and the content of result.json."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            sys.executable,
            "-m",
            "trainkit",
            *replacing(TRAINING, *overrides),
            f"steps={num_steps}",
            f"hydra.run.dir={run}",
        ]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
    logged = [row for row in rows if "train/loss" in row][1:]
    windows = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(logged)]
    return statistics.fmean(windows), result


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=24)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in SYNCHRONOUS}
    late: dict[str, str] = {}
    stale: list[list[str]] = []
    for number in range(options.rounds):
        for name, overrides in SYNCHRONOUS.items():
            seconds, result = train(overrides, options.num_steps)
            times[name].append(seconds)
            late[name] = ", ".join(f"{worker} {count}" for worker, count in result.get("late_gradients", {}).items())
            print(f"round {number + 1}: {name}: {seconds:.3f} s a step", file=sys.stderr, flush=True)
    for name, overrides in ASYNCHRONOUS.items():
        seconds, result = train((*overrides, "strategy.mode=async"), 4 * options.num_steps)
        staleness = result["staleness"]
        counts = ", ".join(f"{number}: {count}" for number, count in staleness["counts"].items())
        stale.append([name, f"{seconds:.3f}", f"{staleness['mean']:.2f}", str(staleness["p95"]), counts])
    rows = [
        [name, f"{statistics.median(seconds):.3f}", report.ratio(seconds, times["one 5 x slower"]), late[name] or "-"]
        for name, seconds in times.items()
    ]
    first = report.table(["sync", "s a step", "ratio to no spare: median (least to most)", "late gradients"], rows)
    second = report.table(["async", "s an update", "mean staleness", "95th percentile", "updates by staleness"], stale)
    report.write(
        "stragglers",
        "One of four workers is five times slower: spares, and staleness",
        f"python benchmarks/stragglers.py --rounds {options.rounds} --num-steps {options.num_steps}",
        f"4 shards a step, {SHARD_S} s a shard by sleeping, a server.\n\n{first}\n\n{second}",
    )


if __name__ == "__main__":
    main()
