"""Measure steps of a small convnet on one thread: trainkit with either memory format beside a hand-written loop.

    python benchmarks/memory_format.py [--rounds 7] [--steps 4]

All three take turns of a few steps in one process. What counts is the processor time of the process, which other
programs on the machine change less than the time of a clock; with one thread the two are equal on an idle machine.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import report
from benchmarks.stepping import RECIPES, plain_loop, take_turns, trainkit_loop
from trainkit.strategies.model_transforms import ModelTransforms

CONVNET = RECIPES["convnet"]


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loops = {
        "hand-written loop": plain_loop(CONVNET),
        "trainkit, contiguous": trainkit_loop(CONVNET, ModelTransforms(memory_format="contiguous")),
        "trainkit, channels_last": trainkit_loop(CONVNET, ModelTransforms(memory_format="channels_last")),
    }
    seconds = take_turns(loops, rounds=given.rounds, steps=given.steps, warmup=given.steps)
    base = seconds["hand-written loop"]
    rows = [[name, f"{statistics.median(own) * 1e3:.1f}", report.ratio(own, base)] for name, own in seconds.items()]
    body = f"{CONVNET.title}, fp32, AdamW, one thread.\n\n"
    body += report.table(["", "ms of processor time a step", "of the hand-written loop: median of rounds"], rows)
    body += "\n\nTarget: at most 0.69 of the hand-written loop."
    command = f"python benchmarks/memory_format.py --rounds {given.rounds} --steps {given.steps}"
    report.write("memory_format", "Memory formats of a small convnet", command, body)


if __name__ == "__main__":
    main()
