"""Measure how much faster two ranks predict than one: the convnet on images of 28 x 28, one thread a process.

    python benchmarks/predict.py [--rows 20000] [--rounds 5]

One rank and two take turns, and each pair of turns gives a ratio. A turn is two commands, of few and of many rows: the
difference of their times has the start of the processes and the merging of few rows taken out. The files of a pair must
have the same bytes.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import trainkit
from benchmarks import report

DATA = ("data=synthetic", "data.shape=[1,28,28]", "data.num_samples=256")
RUN = ("recipe=null", "model=convnet", *DATA, "steps=4", "callbacks=[]", "logger=[]", "quiet=true")
RANKS = (1, 2)
FEW = 2_048
TARGET = 1.7


def seconds(run: Path, out: Path, rows: int, ranks: int) -> float:
    """Return how long a whole command takes."""
    strategy = ["strategy=mirrored", f"strategy.replicas={ranks}"] if ranks > 1 else []
    command = [
        sys.executable, "-m", "trainkit", "predict", str(run), "--out", str(out), "--overwrite",
        f"data.val_samples={rows}", "loader.cache=false", *strategy,
    ]  # fmt: skip
    start = perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    whole: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        trainkit.train(trainkit.compose(RUN), run_dir=run)
        for _ in range(options.rounds):
            for ranks in RANKS:
                out = Path(folder) / f"{ranks}.npy"
                start = seconds(run, out, FEW, ranks)
                whole[ranks].append(seconds(run, out, options.rows, ranks))
                rates[ranks].append((options.rows - FEW) / (whole[ranks][-1] - start))
            if len({(Path(folder) / f"{ranks}.npy").read_bytes() for ranks in RANKS}) > 1:
                raise SystemExit("the files of one rank and of two differ")
    rows = [
        [str(ranks), f"{statistics.median(rates[ranks]):,.0f}", f"{statistics.median(whole[ranks]):.1f}"]
        for ranks in RANKS
    ]
    table = report.table(["ranks", "rows/s", f"seconds of the command, {options.rows:,} rows"], rows)
    ratio = report.ratio(rates[2], rates[1])
    body = f"{table}\n\nTwo ranks over one: {ratio}, {options.rounds} rounds; target {TARGET}. The bytes are the same."
    command = f"python benchmarks/predict.py --rows {options.rows} --rounds {options.rounds}"
    report.write("predict", "Predicting with two ranks", command, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
