"""Measure the overhead of a framework per step, on W1: trainkit's command, a hand-written loop and other trainers.

    python benchmarks/overhead.py [--rounds 9] [--epochs 100]

Every round runs each contender once. A ratio is taken within a round, relative to the hand-written loop of that round,
so that a temporarily slower machine affects both. The median over rounds is reported with its extremes. trainkit is
started as `python -m trainkit`, and its rows in metrics.jsonl give the time of its steps, from the end of the first
fifth of the run to its end. It trains five times as long as the peers, whose clock starts after an epoch: in the first
second another process draws the learning rate and takes a core, and what the first rows need is imported.
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
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import peers, report, workload
from benchmarks.stepping import DIGITS, floor_loop

BASE = (
    "recipe=null", "model=mlp", "optimizer=adamw", "optimizer.lr=0.001", "optimizer.groups={}",
    "schedule=constant", "batch.global_size=64", "eval.every_epochs=null", "checkpoint.keep_best=0",
)  # fmt: skip
OURS: Mapping[str, tuple[str, ...]] = {
    "trainkit, in memory": (),
    "trainkit, map-style dataset, cache off": (
        f"--config-dir={ROOT / 'benchmarks' / 'conf'}", "--allow-package=benchmarks", "data=map_style",
        "loader.cache=false",
    ),
    "trainkit, shards of 8": ("batch.micro_size=8",),
    "trainkit, clip on": ("clip.max_norm=1.0",),
}  # fmt: skip
BY_HAND = "hand-written loop, DataLoader"


def trainkit(overrides: tuple[str, ...]) -> Callable[[int], float]:
    """Return a function that runs the command; its result is seconds per step after the first fifth."""

    def run(epochs: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = f"hydra.run.dir={folder}/run"
            log_every = f"log_every_steps={workload.steps(1)}"
            command = [
                sys.executable,
                "-m",
                "trainkit",
                *BASE,
                *overrides,
                f"epochs={5 * epochs + 1}",
                run_dir,
                log_every,
            ]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "train/loss" in row]
        first, last = rows[len(rows) // 5], rows[-1]
        return float((last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))

    return run


def floor(epochs: int) -> float:
    """Return the seconds of a step without any trainer."""
    step = floor_loop(DIGITS)

    def train(epochs: int) -> None:
        for _ in range(workload.steps(epochs)):
            step()

    return peers.timed(train, epochs)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders: dict[str, Callable[[int], float]] = {
        **peers.available(),
        **{name: trainkit(overrides) for name, overrides in OURS.items()},
        "(eager floor: one gather a batch, fused AdamW)": floor,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name, contender in contenders.items():
            times[name].append(contender(options.epochs))
            print(f"round {number + 1}: {name}: {times[name][-1] * 1e6:.0f} us a step", file=sys.stderr, flush=True)
    rows = [
        [name, f"{statistics.median(seconds) * 1e6:.0f}", report.ratio(seconds, times[BY_HAND])]
        for name, seconds in times.items()
    ]
    report.write(
        "overhead",
        "Time of a step: digits, MLP 64-128-10, batch 64, AdamW, one thread",
        f"python benchmarks/overhead.py --rounds {options.rounds} --epochs {options.epochs}",
        report.table(["", "microseconds a step", "ratio to the hand-written loop: median (least to most)"], rows)
        + "\n\nTargets: at most 0.40 in memory, 0.65 with a map-style dataset.",
    )


if __name__ == "__main__":
    main()
