"""Measure the cost of a sweep: two slots against one job after the other, and the start of a job.

    python benchmarks/sweeps.py [--rounds 3] [--together]

Hydra's basic launcher runs the same jobs one after the other, each in a process of its own as with trainkit, with the
threads of both cores. CPU seconds are reported beside wall time: on a shared machine they vary less. With `--together`
the four commands run at the same time, so that all see the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMMON = ("recipe=null", "eval.metric=val/accuracy", "logger=[]")
SEEDS = ",".join(map(str, range(8)))
FILLS = (*COMMON, "callbacks=[]", "epochs=5", "optimizer.lr=0.01", f"seed={SEEDS}")
ONE_STEP = (*COMMON, "steps=1", "callbacks=[]")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A command and its cost."""

    seconds: float
    """Wall time."""
    cpu_s: float
    """CPU time of all its processes, which other work on the machine hardly changes."""
    most: int
    """Most jobs that ran at the same time."""


def cost_of(*arguments: str, environ: dict[str, str] | None = None) -> Cost:
    """Run trainkit in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done, most = threading.Event(), [0]
        sampler = threading.Thread(target=_sample, args=(Path(folder), done, most))
        sampler.start()
        start = time.perf_counter()
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainkit", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
                stdout=log,
                stderr=log,
            )
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        done.set()
        sampler.join()
        if process.returncode:
            raise SystemExit(f"{arguments} ended with {process.returncode}:\n{(Path(folder) / 'log').read_text()}")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(seconds=seconds, cpu_s=cpu_s, most=most[0])


def _sample(folder: Path, done: threading.Event, most: list[int]) -> None:
    """Count the run folders whose process is alive, twenty times a second; the lock of a folder names the process."""
    while not done.wait(0.05):
        pids = {_holder(lock) for lock in folder.glob("outputs/sweeps/*/*/.lock")} - {0}
        most[0] = max(most[0], sum(Path(f"/proc/{pid}").exists() for pid in pids))


def _holder(lock: Path) -> int:
    try:
        return int(json.loads(lock.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return 0


def main() -> None:
    """Measure, print and write the tables."""
    from benchmarks import report

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="all at a time: on a machine that others load")
    options = parser.parse_args()
    rounds, together = options.rounds, options.together
    runs_of: dict[str, list[Cost]] = {"basic": [], "slots": [], "fresh": [], "twenty": []}
    twenty = f"seed={','.join(map(str, range(20)))}"
    commands = {
        "fresh": (ONE_STEP, {"OMP_NUM_THREADS": "1"}),
        "twenty": (("-m", "sweep.slots=2", *ONE_STEP, twenty), {}),
        "slots": (("-m", "sweep.slots=2", *FILLS), {}),
        "basic": (("-m", "hydra/launcher=basic", *FILLS), {}),
    }

    def measure(name: str) -> None:
        command, environ = commands[name]
        runs_of[name].append(cost_of(*command, environ=environ))
        print(name, runs_of[name][-1], file=sys.stderr, flush=True)

    for _ in range(rounds):
        with ThreadPoolExecutor(max_workers=len(commands) if together else 1) as pool:
            list(pool.map(measure, commands))
    seconds = {name: [run.seconds for run in runs] for name, runs in runs_of.items()}
    cpu_s = {name: [run.cpu_s for run in runs] for name, runs in runs_of.items()}
    each_s, each_cpu_s = ([value / 20 for value in values["twenty"]] for values in (seconds, cpu_s))
    most = str(max(run.most for run in runs_of["slots"]))
    fills = [
        [title, f"{statistics.median(seconds[name]):.1f}", report.ratio(seconds[name], seconds["basic"]),
         f"{statistics.median(cpu_s[name]):.1f}", report.ratio(cpu_s[name], cpu_s["basic"]), at_once]
        for name, title, at_once in (
            ("basic", "hydra/launcher=basic", "1"), ("slots", "hydra/launcher=slots, sweep.slots=2", most),
        )
    ]  # fmt: skip
    starts = [
        ["a fresh process, `trainkit steps=1`", f"{statistics.median(seconds['fresh']):.2f}", "",
         f"{statistics.median(cpu_s['fresh']):.2f}", ""],
        ["a job of 20 in a sweep on 2 slots: the whole sweep / 20", f"{statistics.median(each_s):.2f}",
         report.ratio(each_s, seconds["fresh"]), f"{statistics.median(each_cpu_s):.2f}",
         report.ratio(each_cpu_s, cpu_s["fresh"])],
    ]  # fmt: skip
    load = f"The load of the machine was {os.getloadavg()[0]:.1f} at the end: others were at work on it. "
    load += "Seconds by the clock then compare only what ran at the same moment for as long; CPU seconds hold."
    report.write(
        "sweeps",
        "Sweeps: slots filled, and what a job costs",
        f"python benchmarks/sweeps.py --rounds {rounds}{' --together' * together}",
        "## Eight trainings of digits (5 epochs)\n\n"
        + report.table(["", "seconds", "ratio", "CPU seconds", "ratio", "most jobs at a time (sampled)"], fills)
        + "\n\nTarget: at most 0.60 by the clock.\n\n## The start of a job of one step\n\n"
        + report.table(["", "seconds", "ratio", "CPU seconds", "ratio"], starts)
        + f"\n\n{load}",
    )


if __name__ == "__main__":
    main()
