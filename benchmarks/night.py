"""Fifty edits of a training by the command line and its JSON alone, as an agent would try them over a night.

python benchmarks/night.py [--edits 50] [--seconds 600] [--seed 0]

Each edit changes one key of the best config so far, and is kept where `trainkit compare` answers *better*. Some edits
are no configs, some change nothing that matters. The table counts the answers, the seconds of training (of refused
edits and of those that change nothing: none), and the seconds between two runs of one slot, from result.json to
resolved.yaml. An edit whose runs would pass `--seconds` is left out. At the end one run of each side that was trained
is replayed, and must have the same bits. Exits with 1 if a promise is broken.
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
from pathlib import Path
from typing import Any, Final

SHARED: Final = ("recipe=digits", "epochs=3", "quiet=true", "logger=[]")
PAIRS: Final = 5
EDITS: Final[dict[str, tuple[str, ...]]] = {
    "tried": (
        "optimizer.lr=0.02", "optimizer.lr=0.005", "optimizer.weight_decay=0.1", "optimizer.weight_decay=0.001",
        "model.dropout=0.1", "model.hidden=[136]", "model.hidden=[64]", "batch.global_size=32", "batch.global_size=128",
        "warmup.steps=10", "clip.max_norm=1.0", "optimizer.betas=[0.9,0.95]", "schedule=constant",
        "precision=bf16_mixed",
    ),
    "without effect": (
        "log_every_steps=7", "checkpoint.keep_last=3", "log_every_steps=11", "eval.batch_size=128", "",
    ),
    "refused": (
        "optimizer.lrr=0.02", "model.hidden=wide", "batch.micro_size=0", "optimizer.lr=-1", "strategy=mirrord",
        "batch.global_size=999999", "nosuch=1",
    ),
}  # fmt: skip
"""Kind of edit -> edits."""


def trainkit(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    done = subprocess.run([sys.executable, "-m", "trainkit", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def jobs_of(folder: Path) -> list[tuple[float, float]]:
    """Return begin and end of each run below a folder, by the times of its files."""
    results = folder.glob("*/result.json")
    return sorted((result.with_name("resolved.yaml").stat().st_mtime, result.stat().st_mtime) for result in results)


def lost_between(jobs: list[tuple[float, float]], slots: int) -> list[float]:
    """Return the seconds between the end of a run and the begin of the next one in its slot."""
    ends, lost = list[float](), list[float]()
    for begin, end in jobs:
        if len(ends) == slots:
            lost.append(begin - ends.pop(0))
        ends = sorted([*ends, end])
    return lost


class Night:
    """The edits so far, and what came of them."""

    def __init__(self, edits: int, seconds: float) -> None:
        self.edits, self.seconds = edits, seconds
        self.best: list[str] = []
        self.used, self.longest = 0.0, 0.0
        self.folders: set[Path] = set()
        self.answers, self.broken = Counter[str](), list[str]()

    def try_edit(self, kind: str, edit: str) -> None:
        """Compare the best config with one that has a key changed."""
        key = edit.partition("=")[0]
        other = " ".join([*(line for line in self.best if line.partition("=")[0] != key), edit]).strip()
        if self.used + 2 * self.longest > self.seconds:
            self.answers["left out: the budget"] += 1
            return
        sides = (" ".join(self.best), other)
        code, printed = trainkit("compare", *sides, *SHARED, f"--pairs={PAIRS}", f"--edits={self.edits}", "--json")
        if kind == "refused":
            self.answers["refused"] += code == 2
        if code:
            self.broken += [] if kind == "refused" and code == 2 else [f"{other}: exit code {code}"]
            return
        comparison: dict[str, Any] = json.loads(printed)
        answer = comparison["answer"]
        self.answers[answer] += 1
        if (kind == "without effect") != (answer == "the same"):
            self.broken.append(f"{kind}, {edit}: {comparison['line']}")
        if answer == "the same":
            return
        trained = {Path(comparison[side]["folder"]) for side in ("a", "b")} - self.folders
        self.longest = max(self.longest, comparison["seconds"] / 2)
        self.used += comparison["seconds"] * len(trained) / 2
        self.folders |= trained
        if answer == "better":
            self.best = other.split()

    def replayed(self) -> Counter[int]:
        """Replay a run of each side; return the number of each exit code."""
        firsts = [min(result.parent for result in folder.glob("*/result.json")) for folder in sorted(self.folders)]
        return Counter(trainkit("replay", str(job), f"--out=again/{job.parent.name}", "--json")[0] for job in firsts)


def main() -> int:
    """Try the edits, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds of training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers, night, start = random.Random(options.seed), Night(options.edits, options.seconds), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for _ in range(options.edits):
            kind = numbers.choices([*EDITS], weights=(6, 2, 2))[0]
            night.try_edit(kind, numbers.choice(EDITS[kind]))
        took = time.monotonic() - start
        lost = sorted(gap for folder in night.folders for gap in lost_between(jobs_of(folder), os.cpu_count() or 1))
        replays = night.replayed()
        rows = len(json.loads(trainkit("compare", "--json")[1])["comparisons"])
        os.chdir("/")
    print(f"| {options.edits} edits in {took:.0f} s, {night.used:.1f} s of training | |\n|---|---:|")
    for answer, count in sorted(night.answers.items()):
        print(f"| {answer} | {count} |")
    print(f"| rows of the ledger | {rows} |")
    if lost:
        middle = statistics.median(lost)
        print(
            f"| seconds between two runs of a slot, median and largest of {len(lost)} | {middle:.2f}, {lost[-1]:.2f} |"
        )
    print(f"| replays with the same bits | {replays[0]} of {replays.total()} |")
    print(f"| kept | {' '.join(night.best) or 'nothing'} |")
    broken = [*night.broken, *(f"{count} replays: exit code {code}" for code, count in replays.items() if code)]
    broken += [f"{night.used:.0f} s of training"] if night.used > options.seconds else []
    for line in broken:
        print(f"BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
