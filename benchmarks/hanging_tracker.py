"""Measure what a tracker that never answers costs a step.

    python benchmarks/hanging_tracker.py [--rounds 9] [--steps 20000]

Each round trains the MLP of the digits twice by trainkit's command, once with `logger=[]` and once with
`logger=[wandb]`, where a module of that name hangs in `init`; the order alternates. The time of a step is the first
decile over the rows of metrics.jsonl after the first fifth, in which other programs took least; a ratio is taken within
a round.
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
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

CONTENDERS = ("none", "hanging")


def hanging_package(folder: Path) -> None:
    """Write a package `wandb` whose `init` never returns."""
    (folder / "wandb.py").write_text(
        "import time\nRun = None\nSettings = dict\n\n\ndef init(**_):\n    time.sleep(1e6)\n"
    )
    info = folder / "wandb-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 1\n")


def step_seconds(contender: str, steps: int, packages: Path) -> float:
    """Train once; return seconds a step."""
    logger = ["logger=[wandb]", "logger.wandb.wait_s=0.1", "logger.wandb.warn_s=1"] if contender == "hanging" else []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trainkit", "recipe=digits", "callbacks=[]", "epochs=null", f"steps={steps}",
            "eval.every_epochs=null", "checkpoint.every_s=null", "log_every_steps=50", f"hydra.run.dir={folder}/run",
            *(logger or ["logger=[]"]),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    pairs = list(pairwise(rows))[len(rows) // 5 :]
    windows = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairs]
    return float(statistics.quantiles(windows, n=10)[0])


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as packages:
        hanging_package(Path(packages))
        for number in range(options.rounds):
            for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
                seconds[name].append(step_seconds(name, options.steps, Path(packages)))
    rows = [
        [name, f"{statistics.median(values) * 1e6:.0f}", report.ratio(values, seconds["none"], digits=3)]
        for name, values in seconds.items()
    ]
    body = report.table(["tracker", "microseconds a step", "ratio to no tracker"], rows)
    command = f"python benchmarks/hanging_tracker.py --rounds {options.rounds} --steps {options.steps}"
    report.write("hanging_tracker", "A tracker that never answers", command, body)


if __name__ == "__main__":
    main()
