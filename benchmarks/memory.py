"""Compare the peak resident memory of a digits run with that of a bare script with the same training.

python benchmarks/memory.py [--rounds 3] [--epochs 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report


def peak_mib(command: list[str]) -> float:
    """Return the largest resident set of a command, whose output is discarded."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            os.execve(command[0], command, environment)
        _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return usage.ru_maxrss / 1024


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    epochs = options.epochs
    commands = {
        "bare script": [sys.executable, str(ROOT / "benchmarks" / "bare.py"), str(epochs)],
        "trainkit": [sys.executable, "-m", "trainkit", f"epochs={epochs}", "hydra.run.dir=run"],
        "trainkit, no plots, no TensorBoard": [
            sys.executable, "-m", "trainkit", f"epochs={epochs}", "hydra.run.dir=run", "callbacks=[progress]",
            "logger=[]",
        ],
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            taken[name].append(peak_mib(command))
    rows = [
        [name, f"{statistics.median(found):.0f}", report.ratio(found, taken["bare script"])]
        for name, found in taken.items()
    ]
    report.write(
        "memory",
        "Peak resident memory: digits, MLP 64-128-10",
        f"python benchmarks/memory.py --rounds {options.rounds} --epochs {epochs}",
        report.table(["", "MiB", "ratio to the bare script: median (least to most)"], rows)
        + "\n\nTarget: at most 1.25.",
    )


if __name__ == "__main__":
    main()
