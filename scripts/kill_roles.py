"""Kill each role of a parameter server's run at random moments; check the outcome, and that no process is left.

python scripts/kill_roles.py [--moments 10] [--seed 3]

It takes about 12 minutes. `tests/end_to_end/test_roles.py` does the same once per role.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.end_to_end.test_roles import ALONE, NOISE, RUN, TOGETHER, UNDISTURBED, tasks
from tests.support import quick

ROLES = {
    "chief": ("chief:0",),
    "worker": ("worker:0", "worker:1"),
    "ps": ("ps:0", "ps:1"),
    "evaluator": ("evaluator:0",),
}
LATEST_S = 3.0
"""The latest time of a kill after the first checkpoint."""


def outcome(task: str, mode: str, wait_s: float) -> str:
    """Return the outcome of a run in which a task was killed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = quick.command(*RUN, f"strategy.mode={mode}", f"hydra.run.dir={folder}")
        process = subprocess.Popen(command, cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not list(folder.glob("checkpoints/step_*")):
            if process.poll() is not None:
                return "ended before it was killed"
            time.sleep(0.05)
        time.sleep(wait_s)
        victim = tasks(folder).get(task)
        if victim is None:
            process.communicate()
            return "ended before it was killed"
        os.kill(victim, signal.SIGKILL)
        try:
            _, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            return "hangs"
        promised = ALONE if task.startswith(("worker", "evaluator")) else TOGETHER
        if process.returncode or promised not in errors:
            return f"exit code {process.returncode}: {errors}"
        result = json.loads((folder / "result.json").read_text())
        accuracy = result["metrics"]["val/accuracy"]
        if result["steps"] != 1380 or abs(accuracy - UNDISTURBED) > NOISE:
            return f"{result['steps']} steps, accuracy {accuracy:.4f}"
        return "left processes behind" if tasks(folder) else f"as promised, accuracy {accuracy:.4f}"


def main() -> None:
    """Kill tasks, and count the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=10, help="of each role, half of them in each mode")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    counts: Counter[tuple[str, str, str]] = Counter()
    try:
        for role, members in ROLES.items():
            for number in range(options.moments):
                mode, task = ("sync", "async")[number % 2], members[number // 2 % len(members)]
                result = outcome(task, mode, moments.uniform(0, LATEST_S))
                counts[role, mode, result] += 1
                print(f"{task}, {mode}: {result}", file=sys.stderr, flush=True)
    finally:
        quick.end()
    for (role, mode, result), count in counts.items():
        print(f"{role}, {mode}: {count} {result}")


if __name__ == "__main__":
    main()
