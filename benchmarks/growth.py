"""Measure what grows with samples, replicas, jobs, steps and runs, and write what should not.

    python benchmarks/growth.py [--quick] [--only samples replicas jobs steps runs]

samples     1e5 to 1e7 samples that are computed from their index: processor seconds and memory of a run of 50 steps
replicas    1 to 8 replicas of mirrored: the same of a run of 20 steps, a replica
jobs        a sweep of 10 and of 40 jobs of one step: processor seconds a job
steps       5,000 and 50,000 steps: the time of a step in the first and the last fifth, and memory
runs        a comparison of 100 and of 1,000 runs: seconds, memory and bytes of the page, a run

Processor seconds count all processes of a command; other programs of the machine change them less than a clock. Memory
is the peak of the largest process. `--quick` tries the script on a tenth of the sizes, and writes nothing.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from benchmarks import report

QUIET: Final = (
    f"--config-dir={ROOT / 'benchmarks/conf'}", "--allow-package=benchmarks", "recipe=null", "callbacks=[]",
    "logger=[]", "quiet=true", "report_page=false", "checkpoint.export=false", "checkpoint.keep_best=0",
    "eval.every_epochs=null",
)  # fmt: skip
PAGE: Final = (
    "import sys; from pathlib import Path; from benchmarks.pages import sweep_page; "
    "print(len(sweep_page(Path.cwd(), runs=int(sys.argv[1]), rows=100)))"
)


class Counted:
    """Samples that are computed from their index: eight numbers, and a class."""

    splits: ClassVar[tuple[str, ...]] = ("train",)

    def __init__(self, *, num_samples: int, split: str = "train") -> None:
        del split
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(8.0) + index), index % 2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a command has taken."""

    cpu_s: float
    """Processor seconds of all its processes."""
    mib: float
    """The peak of its largest process."""
    printed: str
    run: Sequence[tuple[int, float]]
    """(step, seconds of training) of each row of metrics, if it was a training."""


def cost_of(*command: str) -> Cost:
    """Run Python in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        with Path(folder, "out").open("w+") as out:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=folder, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            printed = out.read()
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{printed[-2000:]}")
        metrics = Path(folder, "run/metrics.jsonl")
        rows = map(json.loads, metrics.read_text().splitlines() if metrics.is_file() else ())
        run = [(row["step"], row["seconds"]) for row in rows if "train/loss" in row]
    return Cost(cpu_s=used.ru_utime + used.ru_stime, mib=used.ru_maxrss / 1024, printed=printed, run=run)


def train(*overrides: str) -> Cost:
    """Run a training by the command."""
    return cost_of("-m", "trainkit", *QUIET, *overrides, "hydra.run.dir=run")


def steps_us(cost: Cost) -> list[float]:
    """Return the microseconds of a step of each window between two rows."""
    return [1e6 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(cost.run)]


Table = Iterator[list[str]]


def samples(scale: int) -> Table:
    """Yield a row for each number of samples."""
    yield ["samples", "processor s", "MiB", "us a step"]
    for count in (10**5, 10**6, 10**7):
        cost = train(
            "data=counted", f"data.num_samples={count // scale}", "model=mlp", "model.in_features=8",
            "model.out_features=2", "objective=classification", "steps=50", "log_every_steps=10",
        )  # fmt: skip
        yield [
            f"{count // scale:,}",
            f"{cost.cpu_s:.1f}",
            f"{cost.mib:.0f}",
            f"{statistics.median(steps_us(cost)):.0f}",
        ]


def replicas(scale: int) -> Table:
    """Yield a row for each number of replicas."""
    yield ["replicas", "processor s", "a replica", "MiB of the largest process"]
    for count in (1, 2) if scale > 1 else (1, 2, 4, 8):
        cost = train("strategy=mirrored", f"strategy.replicas={count}", "steps=20")
        yield [str(count), f"{cost.cpu_s:.1f}", f"{cost.cpu_s / count:.1f}", f"{cost.mib:.0f}"]


def jobs(scale: int) -> Table:
    """Yield a row for each number of jobs of a sweep."""
    yield ["jobs", "processor s", "a job", "MiB of the largest process"]
    for count in (10, 40):
        number = max(count // scale, 2)
        seeds = ",".join(map(str, range(number)))
        arguments = ("-m", *QUIET, "steps=1", f"seed={seeds}")
        cost = cost_of("-m", "trainkit", *arguments, "hydra.sweep.dir=sweep")
        yield [str(number), f"{cost.cpu_s:.1f}", f"{cost.cpu_s / number:.2f}", f"{cost.mib:.0f}"]


def steps(scale: int) -> Table:
    """Yield a row for each number of steps."""
    yield ["steps", "us a step, first fifth", "last fifth", "MiB"]
    for count in (5_000, 50_000):
        number = count // scale
        cost = train(f"steps={number}", f"log_every_steps={max(number // 500, 1)}")
        windows = steps_us(cost)
        first, last = windows[: len(windows) // 5], windows[-len(windows) // 5 :]
        yield [f"{number:,}", f"{statistics.median(first):.0f}", f"{statistics.median(last):.0f}", f"{cost.mib:.0f}"]


def runs(scale: int) -> Table:
    """Yield a row for each number of runs in a comparison."""
    yield ["runs in a comparison", "processor s", "MiB", "KB of the page", "KB a run"]
    for count in (100, 1_000):
        number = count // scale
        cost = cost_of("-c", PAGE, str(number))
        size = int(cost.printed.split()[-1]) / 1e3
        yield [f"{number:,}", f"{cost.cpu_s:.1f}", f"{cost.mib:.0f}", f"{size:.0f}", f"{size / number:.1f}"]


PARTS: Final[dict[str, Callable[[int], Table]]] = {
    "samples": samples, "replicas": replicas, "jobs": jobs, "steps": steps, "runs": runs,
}  # fmt: skip


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes; writes nothing")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    sections = []
    for name in options.only:
        head, *table = PARTS[name](10 if options.quick else 1)
        sections.append(report.table(head, table))
        print(f"{sections[-1]}\n", file=sys.stderr, flush=True)
    load = f"Steps are timed by the clock. Load of the machine at the end: {os.getloadavg()[0]:.1f}."
    if not options.quick:
        command = f"python benchmarks/growth.py --only {' '.join(options.only)}"
        report.write("growth", "What grows", command, "\n\n".join([*sections, load]))


if __name__ == "__main__":
    main()
