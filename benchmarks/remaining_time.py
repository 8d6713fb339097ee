"""Compare the remaining time that the live line shows after a tenth of a run with the time that the rest takes.

    python benchmarks/remaining_time.py [--rounds 3] [--recipes "shakespeare data.download=true" ...]

Each run is one command, as a user types it, whose lines are read from a pipe as they come. The first line at or after a
tenth of the steps counts. The rest ends with the line that says that the run has finished.

The steps of the first recipe mostly sleep, for 20 ms each, so that other programs of the machine hardly change its
time: it shows the error of the estimate. The others show that of the estimate and of the machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report

SLEEPING = "data.batch_transform={_target_:benchmarks.remaining_time.Sleep,seconds:0.02}"
RECIPES = (f"digits epochs=50 {SLEEPING}", "digits epochs=3000", "friedman epochs=1500")
LINE = re.compile(r"step ([\d,]+)/([\d,]+) .* (?:(\d+):)?(\d+):(\d+) left")


class Sleep:
    """A batch transform that changes nothing, and takes its time."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Any) -> Any:
        """Return the batch after a while."""
        time.sleep(self.seconds)
        return batch


def watched(recipe: str, folder: str) -> tuple[float, float, float]:
    """Run a recipe; return the part of its steps at the line that counts, the seconds it shows, and those it took."""
    command = [
        *(sys.executable, "-u", "-m", "trainkit", *f"recipe={recipe}".split()),
        *("callbacks.progress.every_s=1", "logger=[]", f"hydra.run.dir={folder}/run", "--allow-package", "benchmarks"),
    ]
    shown: tuple[float, float] | None = None
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match = LINE.search(line)
            if shown is None and match is not None:
                step, steps = (int(part.replace(",", "")) for part in match.groups()[:2])
                hours, minutes, seconds = (int(part or 0) for part in match.groups()[2:])
                if step >= steps / 10:
                    part, predicted_s, now = step / steps, 3600 * hours + 60 * minutes + seconds, time.monotonic()
                    shown = (part, predicted_s)
            if line.startswith("finished after"):
                ended = time.monotonic()
    assert shown is not None
    return (*shown, ended - now)


def main() -> None:
    """Run the recipes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options = parser.parse_args()
    rows = []
    for recipe in options.recipes:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                part, predicted_s, took = watched(recipe, folder)
            rows.append(
                [
                    f"`{recipe.replace(SLEEPING, '')}`" + (", 20 ms of sleep a step" if SLEEPING in recipe else ""),
                    f"{part:.0%}",
                    f"{predicted_s:.0f}",
                    f"{took:.1f}",
                    f"{(predicted_s - took) / took:+.0%}",
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
    body = report.table(["recipe", "of the steps", "seconds shown", "seconds that it took", "error"], rows)
    body += "\n\nTarget: within 10 %."
    command = f"python benchmarks/remaining_time.py --rounds {options.rounds}"
    report.write("remaining_time", "The remaining time after a tenth of a run", command, body)


if __name__ == "__main__":
    main()
