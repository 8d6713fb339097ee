"""Measure compiled steps of one device beside eager ones and a hand-written loop, on one thread.

    python benchmarks/compiling.py [--rounds 15] [--recipes digits convnet gpt]

All loops of a recipe take turns in one process (`benchmarks/stepping.py`). Compiling is over before the first turn, a
short last batch included.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import report
from benchmarks.stepping import RECIPES, plain_loop, take_turns, trainkit_loop
from trainkit.strategies.model_transforms import ModelTransforms

TURNS: Mapping[str, tuple[int, int]] = {"digits": (400, 46), "convnet": (4, 18), "gpt": (3, 6)}
"""Steps of a turn, and steps before the first turn."""
MODES: tuple[Literal["off", "default", "step"], ...] = ("off", "default", "step")


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for key in given.recipes:
        recipe, (steps, warmup) = RECIPES[key], TURNS[key]
        loops = {"hand-written loop": plain_loop(recipe)}
        for mode in MODES:
            loops[f"compile.mode={mode}"] = trainkit_loop(recipe, ModelTransforms(compile_mode=mode))
        if recipe.key == "convnet":
            for mode in MODES:
                shaping = ModelTransforms(compile_mode=mode, memory_format="channels_last")
                loops[f"compile.mode={mode}, channels_last"] = trainkit_loop(recipe, shaping)
        found = take_turns(loops, rounds=given.rounds, steps=steps, warmup=warmup)
        for name, seconds in found.items():
            eager = found["compile.mode=off" + (", channels_last" if "last" in name else "")]
            rows.append(
                [
                    recipe.title,
                    name,
                    f"{statistics.median(seconds) * 1e6:,.0f}",
                    report.ratio(seconds, found["hand-written loop"]),
                    report.ratio(seconds, eager),
                ]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    head = ["", "", "microseconds of processor time a step", "of the hand-written loop", "of the eager step"]
    body = "fp32, AdamW, one thread; medians of rounds (least to most).\n\n" + report.table(head, rows)
    body += "\n\nTargets: compiled at most 1.00 of eager; the digits eager at most 0.36 and `step` at most 0.20 of the"
    body += " hand-written loop; the convnet at most 0.69."
    command = f"python benchmarks/compiling.py --rounds {given.rounds} --recipes {' '.join(given.recipes)}"
    report.write("compiling", "Compiled steps", command, body)


if __name__ == "__main__":
    main()
