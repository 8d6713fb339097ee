"""Measure the time from launch to the first step, compared with a bare script; and of commands that need no torch.

python benchmarks/startup.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FIRST_STEP = (
    f"--config-dir={ROOT / 'benchmarks' / 'conf'}", "--allow-package=benchmarks",
    "callbacks=[progress,plots,first_step]",
)  # fmt: skip
ANSWERS = {
    "trainkit --help": (["--help"], 0),
    "trainkit ls": (["ls"], 0),
    "an unknown key": (["batch.micro_sice=3"], 2),
    "an unknown choice": (["strategy=mirorred"], 2),
}


def seconds(command: list[str], code: int = 0) -> float:
    """Return the wall time of a command that ends with this code."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        taken = time.perf_counter() - start
    if done.returncode != code:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return taken


def main() -> None:
    """Measure, print and write the table."""
    from benchmarks import report

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    ours = [sys.executable, "-m", "trainkit"]
    commands = {
        "bare script": ([sys.executable, str(ROOT / "benchmarks" / "bare.py"), "0"], 0),
        "trainkit, one device": ([*ours, *FIRST_STEP], 0),
        **{name: ([*ours, *arguments], code) for name, (arguments, code) in ANSWERS.items()},
    }
    for command, code in commands.values():
        seconds(command, code)  # warm up bytecode and page cache
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, (command, code) in commands.items():
            taken[name].append(seconds(command, code))
    rows = [
        [name, f"{statistics.median(found):.2f}", report.ratio(found, taken["bare script"])]
        for name, found in taken.items()
    ]
    report.write(
        "startup",
        "Start-up: launch to the first finished step, and to an answer",
        f"python benchmarks/startup.py --rounds {rounds}",
        report.table(["", "seconds", "ratio to the bare script: median (least to most)"], rows)
        + "\n\nTargets: at most 1.25 to the first step; at most 0.6 s for an answer.",
    )


if __name__ == "__main__":
    main()
