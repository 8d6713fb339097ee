"""Kill, stop or fail random ranks at random moments of a training; compare the weights with an undisturbed one's.

python scripts/random_kills.py [--kills 20] [--seed 7]

Three ranks of `mirrored` train digits; each run is disturbed once, after its first checkpoint. After a kill, the
seconds until the next row of metrics are measured. 200 take about half an hour on two cores. Exits with 1 if any weight
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import quick

RUN = (
    "recipe=digits", "strategy=mirrored", "strategy.replicas=3", "epochs=null", "steps=60", "log_every_steps=1",
    "checkpoint.every_steps=5", "callbacks=[]", "logger=[]", "hydra.run.dir=run",
    *(f"supervisor.{name}_timeout_s=4" for name in ("hang", "checkpoint", "load", "first_step")),
)  # fmt: skip
PHASES = ("data", "forward", "backward", "reduce", "update", "save")
ACTIONS = ("kill", "stop", "raise")


def train(planted: str) -> tuple[str, float]:
    """Train, disturbed as planted; return the hash of the weights or what went wrong, and the longest time in seconds
    between two rows of metrics.
    """
    with tempfile.TemporaryDirectory() as scratch:
        metrics, sizes, moments = Path(scratch, "run/metrics.jsonl"), 0, list[float]()
        environ = {**os.environ, "TRAINKIT_FAIL": planted} if planted else dict(os.environ)
        with subprocess.Popen(
            quick.command(*RUN), cwd=scratch, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                size = metrics.stat().st_size if metrics.exists() else 0
                if size > sizes:
                    sizes, moments = size, [*moments, time.monotonic()]
                time.sleep(0.005)
            if process.poll() is None:
                process.kill()
                return "it hangs", 0.0
            errors = process.stderr.read() if process.stderr else ""
        if process.returncode:
            return f"exit code {process.returncode}: {errors}", 0.0
        result = json.loads(Path(scratch, "run/result.json").read_text())
        if planted and not result["restarts"]:
            return "it was not disturbed", 0.0
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        return str(result["weights_sha256"]), max(gaps)


def main() -> int:
    """Disturb runs, and count the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    numbers, counts, recovered = random.Random(options.seed), Counter[str](), list[float]()
    try:
        expected, _ = train("")
        for _ in range(options.kills):
            rank, phase, action = numbers.randrange(3), numbers.choice(PHASES), numbers.choice(ACTIONS)
            step = 5 * numbers.randrange(2, 11) if phase == "save" else numbers.randrange(6, 55)
            rank = 0 if phase == "save" else rank
            planted = f"rank={rank},step={step},phase={phase},attempt=0,action={action}"
            weights, gap_s = train(planted)
            counts["the same bits" if weights == expected else "NOT THE SAME"] += 1
            if weights != expected:
                print(f"{planted}: {weights}", flush=True)
            elif action == "kill" and phase != "save":
                recovered.append(gap_s)
    finally:
        quick.end()
    median = (
        f"; next row after SIGKILL {statistics.median(recovered):.2f} s (median of {len(recovered)})"
        if recovered
        else ""
    )
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + median)
    return int(counts["NOT THE SAME"] > 0)


if __name__ == "__main__":
    sys.exit(main())
