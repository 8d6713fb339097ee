"""Measure the steps of a convnet, each training in a process of its own, which take turns, on one thread.

    python benchmarks/processes.py [--rounds 5]

A training of trainkit keeps the memory that a step frees; in the process of `benchmarks/compiling.py` the hand-written
loop would profit from it too. Each process makes 18 steps before it measures 24.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import report
from benchmarks.stepping import RECIPES, plain_loop, trainkit_loop
from trainkit.strategies.model_transforms import ModelTransforms

BY_HAND = "hand-written loop"
TRANSFORMS = {
    "compile.mode=off": ModelTransforms(),
    "compile.mode=default": ModelTransforms(compile_mode="default"),
    "compile.mode=step": ModelTransforms(compile_mode="step"),
    "compile.mode=off, channels_last": ModelTransforms(memory_format="channels_last"),
    "compile.mode=default, channels_last": ModelTransforms(compile_mode="default", memory_format="channels_last"),
    "compile.mode=step, channels_last": ModelTransforms(compile_mode="step", memory_format="channels_last"),
}
CONTENDERS = (BY_HAND, *TRANSFORMS)


def measured(contender: str) -> float:
    """Return the seconds of processor time of a step in this process."""
    torch.set_num_threads(1)
    recipe = RECIPES["convnet"]
    step = plain_loop(recipe) if contender == BY_HAND else trainkit_loop(recipe, TRANSFORMS[contender])
    for _ in range(18):
        step()
    times = []
    for _ in range(12):
        begun = time.process_time()
        step()
        step()
        times.append((time.process_time() - begun) / 2)
    return statistics.median(times)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=CONTENDERS, help="print the seconds of this one, in this process")
    given = parser.parse_args()
    if given.one:
        print(measured(given.one))
        return
    found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for _ in range(given.rounds):
        for contender, seconds in found.items():
            own = [sys.executable, __file__, "--one", contender]
            done = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True)
            seconds.append(float(done.stdout.split()[-1]))
    rows = [
        [name, f"{statistics.median(seconds) * 1e3:.1f}", report.ratio(seconds, found[BY_HAND])]
        for name, seconds in found.items()
    ]
    head = ["", "milliseconds of processor time a step", "of the hand-written loop"]
    body = "Convnet 32-64-128 on 28 x 28 images, batch 128, fp32, AdamW; medians of rounds (least to most).\n\n"
    body += report.table(head, rows) + "\n\nTarget: at most 0.69."
    command = f"python benchmarks/processes.py --rounds {given.rounds}"
    report.write("processes", "Steps of processes of their own", command, body)


if __name__ == "__main__":
    main()
