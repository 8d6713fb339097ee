"""What a sweep costs: two slots filled against one job after the other, and the start of a job against a fresh process.

    python benchmarks/sweeps.py [--rounds 3]

Hydra's basic launcher runs the same jobs one after the other, each in a process of its own as trainkit has it, with
the threads of both cores. Runs of one round follow each other directly, so that a machine that others use disturbs
both.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMMON = ("recipe=null", "eval.metric=val/accuracy", "logger=[]")
SEEDS = ",".join(map(str, range(8)))
FILLS = (*COMMON, "callbacks=[]", "epochs=10", "optimizer.lr=0.01", f"seed={SEEDS}")
ONE_STEP = (*COMMON, "steps=1", "callbacks=[]")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A command and what it took."""

    seconds: float
    most: int
    """Most jobs that ran at the same moment."""


def taken(*arguments: str, environ: dict[str, str] | None = None) -> Taken:
    """Run trainkit in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done, most = threading.Event(), [0]
        sampler = threading.Thread(target=_sample, args=(Path(folder), done, most))
        sampler.start()
        start = time.perf_counter()
        command = [sys.executable, "-m", "trainkit", *arguments]
        ended = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        done.set()
        sampler.join()
    if ended.returncode:
        raise SystemExit(f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return Taken(seconds=seconds, most=most[0])


def _sample(folder: Path, done: threading.Event, most: list[int]) -> None:
    """Count the run folders whose process lives, twenty times a second: the lock of a folder names it."""
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
    rounds = parser.parse_args().rounds
    found: dict[str, list[Taken]] = {"basic": [], "slots": [], "fresh": [], "twenty": []}
    twenty = f"seed={','.join(map(str, range(20)))}"
    for _ in range(rounds):
        found["basic"].append(taken("-m", "hydra/launcher=basic", *FILLS))
        found["slots"].append(taken("-m", "sweep.slots=2", *FILLS))
        found["fresh"].append(taken(*ONE_STEP, environ={"OMP_NUM_THREADS": "1"}))
        found["twenty"].append(taken("-m", "sweep.slots=2", *ONE_STEP, twenty))
        print({name: [round(one.seconds, 1) for one in runs] for name, runs in found.items()}, file=sys.stderr)
    seconds = {name: [one.seconds for one in runs] for name, runs in found.items()}
    each = [value / 20 for value in seconds["twenty"]]
    fills = [
        ["hydra/launcher=basic", f"{statistics.median(seconds['basic']):.1f}", "1.00", "1"],
        ["hydra/launcher=slots, sweep.slots=2", f"{statistics.median(seconds['slots']):.1f}",
         report.ratio(seconds["slots"], seconds["basic"]), str(max(one.most for one in found["slots"]))],
    ]  # fmt: skip
    starts = [
        ["a fresh process, `trainkit steps=1`", f"{statistics.median(seconds['fresh']):.2f}", "1.00"],
        ["a job of 20 in a sweep on 2 slots: its wall time / 20", f"{statistics.median(each):.2f}",
         report.ratio(each, seconds["fresh"])],
        ["the slot time of such a job, the sweep's own start and end included", f"{2 * statistics.median(each):.2f}",
         report.ratio([2 * value for value in each], seconds["fresh"])],
    ]  # fmt: skip
    load = f"The load of the machine was {os.getloadavg()[0]:.1f} at the end: others were at work on it."
    report.write(
        "sweeps",
        "Sweeps: slots filled, and what a job costs",
        f"python benchmarks/sweeps.py --rounds {rounds}",
        "## Eight trainings of digits (10 epochs)\n\n"
        + report.table(["", "seconds", "ratio", "most jobs at a time (sampled)"], fills)
        + "\n\nTarget: at most 0.60.\n\n## The start of a job of one step\n\n"
        + report.table(["", "seconds", "ratio"], starts)
        + f"\n\n{load}",
    )


if __name__ == "__main__":
    main()
