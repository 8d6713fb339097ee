"""Measure compiled steps of one device beside eager ones and a hand-written loop, on one thread.

    python benchmarks/compiling.py [--rounds 5] [--recipes digits convnet gpt]

Each training runs in a process of its own, and the processes take turns: a training of trainkit keeps the memory that a
step frees, and excludes the objects that live to its end from garbage collection, and in one process the others would
profit from it. Processor time counts, which other programs of the machine change less than that of a clock. Compiling
is over before the first step that counts, a short last batch included.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import report, workload
from benchmarks.stepping import RECIPES, floor_loop, plain_loop, trainkit_loop
from trainkit.numerics.precision import Precision
from trainkit.strategies.model_transforms import ModelTransforms

Turns = tuple[int, int, int]
TURNS: Mapping[str, Turns] = {"digits": (300, 10, 200), "convnet": (18, 12, 2), "gpt": (6, 9, 2)}
"""Steps before the first that counts; turns, and steps of a turn."""
BY_HAND = "hand-written loop"
FLOOR = "an eager step without any trainer"
EAGER = "compile.mode=off"
BF16 = "precision=bf16_mixed"
MAP_STYLE, MAP_STYLE_FLOOR = "map-style dataset", f"{FLOOR}, map-style dataset"
"""The digits, read sample by sample: by the loader of a run, and by nothing but a list and torch.stack."""
TRANSFORMS: Mapping[str, ModelTransforms] = {
    EAGER: ModelTransforms(),
    "compile.mode=default": ModelTransforms(compile_mode="default"),
    "compile.mode=step": ModelTransforms(compile_mode="step"),
}
CHANNELS_LAST: Mapping[str, ModelTransforms] = {
    f"{EAGER}, channels_last": ModelTransforms(memory_format="channels_last"),
    "compile.mode=default, channels_last": ModelTransforms(compile_mode="default", memory_format="channels_last"),
    "compile.mode=step, channels_last": ModelTransforms(compile_mode="step", memory_format="channels_last"),
}


def contenders(key: str) -> list[str]:
    """Return the names of a recipe's trainings."""
    return [BY_HAND, FLOOR, *TRANSFORMS, *(CHANNELS_LAST if key == "convnet" else ())]


def apart(key: str, contender: str, turns: Turns | None = None) -> float:
    """Return the seconds of processor time of a step in a process of its own."""
    command = [sys.executable, __file__, "--one", key, contender, "--turns", *map(str, turns or TURNS[key])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def measured(key: str, contender: str, counts: Turns) -> float:
    """Return the seconds of processor time of a step in this process."""
    torch.set_num_threads(1)
    recipe, (before, turns, steps) = RECIPES[key], counts
    samples = workload.MapStyle() if contender in (MAP_STYLE, MAP_STYLE_FLOOR) else None
    if contender == BY_HAND:
        step = plain_loop(recipe)
    elif contender in (FLOOR, MAP_STYLE_FLOOR):
        step = floor_loop(recipe, samples)
    else:
        precision = Precision(value="bf16_mixed" if contender == BF16 else "fp32")
        transforms = {**TRANSFORMS, **CHANNELS_LAST}.get(contender, ModelTransforms())
        step = trainkit_loop(recipe, transforms, precision, samples=samples)
        gc.freeze()  # as a training does before its first step
    for _ in range(before):
        step()
    times = []
    for _ in range(turns):
        start = time.process_time()
        for _ in range(steps):
            step()
        times.append((time.process_time() - start) / steps)
    return statistics.median(times)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", default=list(TURNS), choices=list(TURNS))
    parser.add_argument("--one", nargs=2, help="print the seconds of one training of a recipe, in this process")
    parser.add_argument("--turns", nargs=3, type=int, help="with --one: steps before, turns, and steps of a turn")
    options = parser.parse_args()
    if options.one:
        key, contender = options.one
        print(measured(key, contender, options.turns or TURNS[key]))
        return
    rows = []
    for key in options.recipes:
        seconds_of: dict[str, list[float]] = {contender: [] for contender in contenders(key)}
        for _ in range(options.rounds):
            for contender, seconds in seconds_of.items():
                seconds.append(apart(key, contender))
        for name, seconds in seconds_of.items():
            eager = seconds_of[EAGER + (", channels_last" if "channels_last" in name else "")]
            per_step = f"{statistics.median(seconds) * 1e6:,.0f}"
            rows.append([RECIPES[key].title, name, per_step, report.ratio(seconds, seconds_of[BY_HAND])])
            rows[-1].append(report.ratio(seconds, eager))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    head = ["", "", "microseconds of processor time a step", "of the hand-written loop", "of the eager step"]
    body = "fp32, AdamW, one thread; medians of rounds (least to most).\n\n" + report.table(head, rows)
    body += "\n\nTargets: compiled at most 1.00 of eager; the digits eager at most 0.36 and `step` at most 0.20 of the"
    body += " hand-written loop; the convnet at most 0.69."
    command = f"python benchmarks/compiling.py --rounds {options.rounds} --recipes {' '.join(options.recipes)}"
    report.write("compiling", "Compiled steps", command, body)


if __name__ == "__main__":
    main()
