"""Measure whether pruning pays: steps until an Optuna search reaches the best result of a grid, and the grid's steps.

    python benchmarks/pruning.py [--seeds 0 1 2] [--epochs 25] [--keep FOLDER]

The digits recipe with a larger network and small batches. The grid has 24 points; Optuna has 24 trials in the intervals
that the grid spans, with the median pruner, by the public command. A job counts with all its steps, from its start: the
steps of jobs that ran beside the one that reached the mark belong to the search, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

METRIC = "val/accuracy"
TRAINING = (
    "recipe=digits", "batch.global_size=32", "model.hidden=[256,256]", "callbacks=[]", "logger=[]",
    "log_every_steps=500", "eval.every_epochs=1", "checkpoint.keep_best=0",
)  # fmt: skip
GRID = (
    "optimizer.lr=0.1,0.03,0.01,0.003,0.001,0.0003", "model.dropout=0.0,0.3", "optimizer.weight_decay=0.005,0.5",
)  # fmt: skip
SPACE = (
    "optimizer.lr=tag(log,interval(0.0003,0.1))", "model.dropout=interval(0,0.3)",
    "optimizer.weight_decay=tag(log,interval(0.005,0.5))",
)  # fmt: skip
TRIALS = 24


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended."""

    begun: float
    ended: float
    steps: int
    figure: float | None


def jobs_of(folder: Path) -> list[Ended]:
    """Return the jobs of a sweep in the order in which they ended; a pruned one counts with its last evaluation."""
    jobs = []
    for path in folder.glob("*/result.json"):
        result = json.loads(path.read_text())
        start = (path.parent / "environment.json").stat().st_mtime
        figure = result["metrics"].get(METRIC)
        jobs.append(Ended(begun=start, ended=path.stat().st_mtime, steps=result["steps"], figure=figure))
    return sorted(jobs, key=lambda job: job.ended)


def progress(jobs: list[Ended]) -> list[tuple[int, float]]:
    """Return the steps spent and the best value so far, at the end of each job."""
    points, best = [], 0.0
    for job in jobs:
        best = max(best, job.figure or 0.0)
        points.append((sum(other.steps for other in jobs if other.begun <= job.ended), best))
    return points


def sweep(folder: Path, *arguments: str) -> list[Ended]:
    """Run a sweep to its end."""
    command = [sys.executable, "-m", "trainkit", "-m", *TRAINING, *arguments, f"hydra.sweep.dir={folder}"]
    subprocess.run(command, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return jobs_of(folder)


def draw(path: Path, grid: list[tuple[int, float]], searches: dict[int, list[tuple[int, float]]]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from trainkit.report.plots import BLUE, GREY, ORANGE, STYLE, save

    with mpl.rc_context(STYLE):
        chart = Figure(figsize=(7.2, 4.0), dpi=140, layout="constrained")
        axes = chart.subplots()
        axes.set_title("Best validation accuracy by steps spent, all jobs together", loc="left", fontweight="bold")
        for index, (seed, points) in enumerate(searches.items()):
            shade: dict[str, Any] = {"alpha": 0.9 - 0.25 * index, "linewidth": 2.0}
            axes.step(*zip(*points, strict=True), where="post", color=ORANGE, label=f"Optuna, seed {seed}", **shade)
        axes.step(*zip(*grid, strict=True), where="post", color=BLUE, linewidth=2, label="grid")
        axes.axhline(grid[-1][1], color=GREY, linewidth=1, linestyle=(0, (2, 2)))
        axes.axvline(grid[-1][0] / 2, color=GREY, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate("half of the grid's steps", (grid[-1][0] / 2, axes.get_ylim()[0]), (4, 5),
                      textcoords="offset points", color=GREY, fontsize=9)  # fmt: skip
        axes.set_xlabel("steps")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
        axes.legend(loc="lower right")
        save(chart, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--keep", type=Path, help="where the sweeps go; existing ones are not run again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        epochs = f"epochs={args.epochs}"
        searches = {"grid": sweep(folder / "grid", epochs, *GRID)}
        search = ("hydra/sweeper=optuna", f"sweep.trials={TRIALS}")
        for seed in args.seeds:
            searches[f"seed {seed}"] = sweep(folder / f"seed{seed}", epochs, *search, f"sweep.seed={seed}", *SPACE)
        write_results(searches, args)


def write_results(searches: dict[str, list[Ended]], args: argparse.Namespace) -> None:
    """Write the table and the plot."""
    grid, *_ = curves = [progress(jobs) for jobs in searches.values()]
    whole, mark = grid[-1]
    rows = [["grid, 24 points", f"{whole:,}", f"{mark:.4f}", "", "", ""]]
    for seed, points, jobs in zip(args.seeds, curves[1:], list(searches.values())[1:], strict=True):
        reached = next((steps for steps, best in points if best >= mark), None)
        share = ["not reached", ""] if reached is None else [f"{reached:,}", f"**{reached / whole:.2f}**"]
        full = max(job.steps for job in jobs)
        cut = sum(job.steps < full for job in jobs)
        rows.append(
            [f"Optuna, seed {seed}", f"{points[-1][0]:,}", f"{points[-1][1]:.4f}", *share, f"{cut} of {len(jobs)}"]
        )
    head = ["", "steps in all", "best accuracy", "steps to the grid's best", "of the grid's", "ended early"]
    body = f"{TRIALS} trials, median pruner, jobs of {args.epochs} epochs.\n\n{report.table(head, rows)}"
    command = f"python benchmarks/pruning.py --seeds {' '.join(map(str, args.seeds))} --epochs {args.epochs}"
    report.write("pruning", "Steps until Optuna with pruning has what a grid found", command, body)
    draw(ROOT / "docs/images/pruning.png", grid, dict(zip(args.seeds, curves[1:], strict=True)))


if __name__ == "__main__":
    main()
