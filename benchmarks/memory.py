"""Compare the peak resident memory of a digits run with that of a bare script with the same training.

python benchmarks/memory.py [--rounds 3] [--epochs 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

_MEASURE: Final = """
import os, sys
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
print(usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Runs in a process of its own: a command's peak begins with that of the process which starts it."""


def peak_mib(command: list[str]) -> float:
    """Return the largest resident set of a command, whose output is discarded."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _MEASURE, *command], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    return float(done.stdout.split()[-1])


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
    peaks: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            peaks[name].append(peak_mib(command))
    rows = [
        [name, f"{statistics.median(values):.0f}", report.ratio(values, peaks["bare script"])]
        for name, values in peaks.items()
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
