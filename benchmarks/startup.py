"""Measure the time from launch to the first step, compared with a bare script; and of commands that need no torch.

Then whole runs of two steps, with their evaluation and everything that a run writes, are compared with the bare script
of two steps, alone and under torchrun: CPU seconds of all their processes, and the time until the command ends.

python benchmarks/startup.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

# bytecode is cached, as on a machine of a user
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
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
        elapsed = time.perf_counter() - start
    if done.returncode != code:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return elapsed


OURS = [sys.executable, "-m", "trainkit"]
BARE = [str(ROOT / "benchmarks" / "bare.py"), "1", "2"]
DDP = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *BARE]
RUN = [*OURS, "stop_at_step=2"]
MIRRORED = [*RUN, "strategy=mirrored", "strategy.replicas=2"]
NO_PICTURES = ["callbacks=[progress]", "report_page=false"]
TWO_STEPS = {
    "bare script": [sys.executable, *BARE],
    "one device, no pictures": [*RUN, *NO_PICTURES],
    "one device": RUN,
    "torchrun, two ranks of DDP": DDP,
    "mirrored, two replicas, no pictures": [*MIRRORED, *NO_PICTURES],
    "mirrored, two replicas": MIRRORED,
}
OPPONENTS = {name: "torchrun, two ranks of DDP" if "two" in name else "bare script" for name in TWO_STEPS}
_PR_SET_CHILD_SUBREAPER = 36


def cpu_and_wall(command: list[str]) -> tuple[float, float]:
    """Return the CPU seconds of a command and of all processes below it, and the seconds until it ended."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    wall = seconds(command)
    while True:  # what outlives the command is adopted by this process: the writer of the pictures
        try:
            os.wait()
        except ChildProcessError:
            return used() - before, wall


def two_steps(rounds: int) -> str:
    """Return the table of runs of two steps."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for command in TWO_STEPS.values():
        seconds(command)
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in TWO_STEPS}
    for _ in range(rounds):
        for name, command in TWO_STEPS.items():
            costs[name].append(cpu_and_wall(command))
    rows = []
    for name, pairs in costs.items():
        cpu, wall = zip(*pairs, strict=True)
        cpu_base, wall_base = zip(*costs[OPPONENTS[name]], strict=True)
        rows.append([
            name, f"{statistics.median(cpu):.2f}", report.ratio(cpu, cpu_base),
            f"{statistics.median(wall):.2f}", report.ratio(wall, wall_base),
        ])  # fmt: skip
    head = ["two steps", "CPU seconds", "ratio to the bare script, or to torchrun", "seconds", "ratio"]
    return report.table(head, rows)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    commands = {
        "bare script": ([sys.executable, str(ROOT / "benchmarks" / "bare.py"), "0"], 0),
        "trainkit, one device": ([*OURS, *FIRST_STEP], 0),
        **{name: ([*OURS, *arguments], code) for name, (arguments, code) in ANSWERS.items()},
    }
    for command, code in commands.values():
        seconds(command, code)  # warm up bytecode and page cache
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, (command, code) in commands.items():
            times[name].append(seconds(command, code))
    rows = [
        [name, f"{statistics.median(values):.2f}", report.ratio(values, times["bare script"])]
        for name, values in times.items()
    ]
    report.write(
        "startup",
        "Start-up: launch to the first finished step, and to an answer",
        f"python benchmarks/startup.py --rounds {rounds}",
        report.table(["", "seconds", "ratio to the bare script: median (least to most)"], rows)
        + "\n\nTargets: at most 1.25 to the first step; at most 0.6 s for an answer.\n\n"
        + two_steps(rounds)
        + "\n\nTargets in CPU seconds: one device 1.2 without pictures, 1.5 with them; mirrored 0.75, its time 1.0.",
    )


if __name__ == "__main__":
    main()
