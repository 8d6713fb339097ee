"""The spread of a recipe over seeds, and what pairing gains for six kinds of changes: the tables of docs/noise.md.

python benchmarks/noise.py RECIPE [--pairs 8] [--set KEY=VALUE ...]

Each change is compared with the recipe by `trainkit compare --json`, with the seeds 0 to N-1. Shortened trainings say
nothing about long ones: the head of the table names the settings. The last two columns are the pairs after which a
difference of 1 % of the loss is told from 0 at these deviations, with pairing and without.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.night import trainkit
from trainkit.sweeps.verdict import FEWEST, t_bound

RECIPES: Final = {
    "digits": (
        ("epochs=10",),
        ("optimizer.weight_decay=0.1", "optimizer.lr=0.008", "model.dropout=0.1", "batch.global_size=128",
         "clip.max_norm=1.0", "model.hidden=[136]"),
    ),
    "friedman": (
        ("epochs=10",),
        ("optimizer.weight_decay=0.1", "optimizer.lr=0.008", "model.dropout=0.1", "batch.global_size=128",
         "clip.max_norm=1.0", "model.activation=gelu"),
    ),
    "fashion_mnist": (
        ("epochs=null", "steps=60", "warmup.epochs=null", "warmup.steps=10", "eval.every_epochs=null"),
        ("optimizer.weight_decay=0.1", "optimizer.lr=0.0032", "model.dropout=0.2", "batch.global_size=256",
         "clip.max_norm=1.0", "model.widths=[40,64,128]"),
    ),
    "shakespeare": (
        ("steps=100", "warmup.steps=10", "data.val_share=0.02", "eval.every_steps=null"),
        ("optimizer.weight_decay=0.2", "optimizer.lr=0.0016", "model.dropout=0.1", "batch.global_size=16",
         "clip.max_norm=0.5", "model.width=136"),
    ),
}  # fmt: skip
"""Recipe -> settings of both sides, and six changes."""


def pairs_for(difference: float, deviation: float) -> int:
    """Return the pairs from which a mean difference is told from 0."""
    return next(pairs for pairs in count(FEWEST) if t_bound(pairs) * deviation / math.sqrt(pairs) < difference)


def main() -> int:
    """Compare, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of both sides")
    options = parser.parse_args()
    (settings, changes), start = RECIPES[options.recipe], time.monotonic()
    shared = [f"recipe={options.recipe}", *settings, *options.set, "callbacks=[]", "logger=[]"]
    rows, values = list[str](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for change in changes:
            code, printed = trainkit("compare", "", change, *shared, f"--pairs={options.pairs}", "--json")
            if code:
                sys.stderr.write(f"{change}: exit code {code}\n{printed}")
                return int(code)
            pairs = [(pair["a"], pair["b"]) for pair in json.loads(printed)["pairs"]]
            values = [a for a, _ in pairs]
            gaps, apart = [b - a for a, b in pairs], math.hypot(*map(stdev, zip(*pairs, strict=True)))
            gain, percent = (apart / stdev(gaps)) ** 2, fmean(values) / 100
            needed = f"{pairs_for(percent, stdev(gaps))} | {pairs_for(percent, apart)}"
            rows.append(f"| `{change}` | {fmean(gaps):.4f} | {gain:.2g} | {needed} |")
        os.chdir("/")
    print(
        f"`{' '.join(shared)}`, {options.pairs} seeds: loss {fmean(values):.4f}, deviation {stdev(values):.4f}", end=""
    )
    print(f" ({100 * stdev(values) / fmean(values):.2g} %); {time.monotonic() - start:.0f} s\n")
    print("| change | mean difference | gain | pairs for 1 % | without pairing |\n|---|---:|---:|---:|---:|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
