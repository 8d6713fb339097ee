"""Compare sync and async at equal time, and the policies for stale gradients, on a recipe.

    python benchmarks/policies.py [--recipe digits] [--workers 4] [--epochs 6] [--target 0.95]

Every setting trains once with the public command, with evaluations on the way; one worker waits for a twentieth of a
second before each of its shards (the failpoint `slow`). The table lists the time to a target accuracy, and the accuracy
of each when the first run had ended; the plot shows the accuracy over the seconds of training.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import subprocess
import sys
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

PICTURE = ROOT / "docs" / "images" / "staleness_policies.png"
SETTINGS = {
    "sync": (),
    "sync, one spare": ("strategy.spare_replicas=1",),
    "async, accept": ("strategy.mode=async",),
    "async, drop above 4": ("strategy.mode=async", "strategy.staleness.policy=drop", "strategy.staleness.bound=4"),
    "async, scale": ("strategy.mode=async", "strategy.staleness.policy=scale"),
    "async, lr": ("strategy.mode=async", "strategy.staleness.policy=lr"),
    "async, bound 4": ("strategy.mode=async", "strategy.staleness.policy=bound", "strategy.staleness.bound=4"),
}
Curve = list[tuple[float, float]]
"""(seconds of training, validation accuracy)."""


def train(overrides: tuple[str, ...], options: argparse.Namespace) -> tuple[Curve, dict[str, Any]]:
    """Return a run's accuracy over time, and the content of result.json."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        chosen = (
            f"recipe={options.recipe}", "strategy=parameter_server", f"strategy.workers={options.workers}", *overrides,
            "optimizer=sgd", f"optimizer.lr={options.lr}", f"epochs={options.epochs}", "eval.every_epochs=0.25",
            "batch.micro_size=16", "log_every_steps=1", "checkpoint.keep_best=0", f"hydra.run.dir={run}",
        )  # fmt: skip
        environ = os.environ | {"PYTHONPATH": str(ROOT), "TRAINKIT_FAIL": "rank=2,phase=forward,action=slow"}
        command = [sys.executable, "-m", "trainkit", *chosen]
        subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
    seconds = {row["step"]: row["seconds"] for row in rows if "seconds" in row}
    return [(seconds[row["step"]], row["val/accuracy"]) for row in rows if "val/accuracy" in row], result


def reached(curve: Curve, target: float) -> str:
    """Return the first time at which an accuracy was reached."""
    first = next((seconds for seconds, accuracy in curve if accuracy >= target), None)
    return "-" if first is None else f"{first:.1f}"


def accuracy_at(curve: Curve, seconds: float) -> str:
    """Return the accuracy at a time."""
    index = bisect_right([moment for moment, _ in curve], seconds)
    return f"{curve[index - 1][1]:.4f}" if index else "-"


def draw(curves: dict[str, Curve]) -> None:
    """Plot accuracy over time."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name, linestyle="-" if name.startswith("sync") else "--")
    axes.set(xlabel="seconds of training", ylabel="validation accuracy")
    axes.legend()
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    """Measure, draw, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--target", type=float, default=0.95)
    options = parser.parse_args()
    curves: dict[str, Curve] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, overrides in SETTINGS.items():
        curves[name], results[name] = train(overrides, options)
        print(f"{name}: {curves[name][-1]}", file=sys.stderr, flush=True)
    first = min(curve[-1][0] for curve in curves.values())
    rows = []
    for name, curve in curves.items():
        stale = results[name].get("staleness")
        staleness = f"{stale['mean']:.1f}, {stale['p95']}" if stale else "-"
        rows.append([name, reached(curve, options.target), accuracy_at(curve, first), f"{curve[-1][1]:.4f}", staleness])
    head = [
        "",
        f"s to {options.target:g}",
        f"accuracy after {first:.1f} s",
        "accuracy at the end",
        "staleness: mean, p95",
    ]
    draw(curves)
    report.write(
        "policies",
        f"Sync, async, and the policies for stale gradients: {options.recipe}, one of {options.workers} workers slow",
        f"python benchmarks/policies.py --recipe {options.recipe} --workers {options.workers} "
        f"--epochs {options.epochs} --lr {options.lr} --target {options.target}",
        report.table(head, rows),
    )


if __name__ == "__main__":
    main()
