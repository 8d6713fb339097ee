"""Run what takes hours and needs no GPU, and write what it found: `python scripts/nightly.py [PART ...]`.

    python scripts/nightly.py                    every part, in some hours
    python scripts/nightly.py layouts kills      the named parts
    python scripts/nightly.py layouts --draws 20 --seed 3

Each part is a line of `benchmarks/results/nightly.md`, with its date, commit and figures; parts that did not run keep
their line. Exits with 1 if a part failed. `PARTS` is the list.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

TODAY: Final = datetime.now().astimezone().date()
ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks/results/nightly.md"
PYTEST: Final = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
PARTS: Final = {
    "layouts": [sys.executable, __file__, "--only-layouts"],
    "meshes": [sys.executable, "benchmarks/meshes.py"],
    "matrix": [*PYTEST, "-m", "matrix"],
    "long": [*PYTEST, "-m", "long and not matrix"],
    "stories": [*PYTEST, "-m", "long or not long", "tests/outside"],
    "engines": [*PYTEST, "-m", "engine", "--numprocesses", "0"],
    "kills": [sys.executable, "scripts/kill_roles.py", "--moments", "50"],
    "random_kills": [sys.executable, "scripts/random_kills.py", "--kills", "200"],
    "mutants": [sys.executable, "scripts/mutants.py"],
    "floors": [sys.executable, "scripts/floors.py"],
}
"""Part -> its command. `layouts` proves random layouts; the scripts and the marks of pytest describe the others.

`meshes` also writes `benchmarks/results/meshes.md`.
"""
LIMIT_S: Final = 60.0
"""Longest time of a proof of one layout."""
LAYOUTS: Final[tuple[tuple[str, dict[str, tuple[object, ...]]], ...]] = (
    ("mirrored", {"strategy.replicas": (2, 3, 4), "strategy.reduce": ("auto", "backend", "ring")}),
    ("mirrored", {"strategy.replicas": (2, 3, 4), "numerics.reproducible": ("true",)}),
    ("fsdp", {"strategy.replicas": (2, 3), "strategy.sync": ("each", "last")}),
    ("fsdp", {"strategy.replicas": (2, 3, 4), "numerics.reproducible": ("true",), "optimizer.fused": ("false",)}),
    ("pipeline", {"strategy.stages": (2,), "strategy.schedule": ("gpipe", "1f1b", "zero_bubble")}),
    (
        "mesh",
        {
            "strategy.replicate": (1, 2),
            "strategy.shard": (1, 2),
            "strategy.tensor": (1, 2),
            "model.dropout": (0.0,),
        },
    ),
    ("tensor_parallel", {"strategy.degree": (2,), "strategy.replicas": (1, 2), "model.dropout": (0.0,)}),
    ("central_storage", {}),
    ("parameter_server", {"strategy.workers": (1, 2, 3), "strategy.servers": (1, 2)}),
)
TRAININGS: Final[tuple[tuple[str, dict[str, tuple[object, ...]]], ...]] = (
    ("digits", {"batch.global_size": (31, 24, 60), "batch.micro_size": (3, 8)}),
    ("python_source", {"batch.global_size": (4, 6), "activation_checkpointing": ("none", "full", "selective")}),
)
SETTINGS: Final[dict[str, tuple[object, ...]]] = {
    "precision": ("fp32", "fp64", "bf16_mixed"),
    "clip.max_norm": ("null", 0.5),
    "optimizer": ("adamw", "sgd"),
    "model.dropout": (0.0, 0.2),
    "average": ("none", "ema"),
}


def drawn(numbers: random.Random) -> list[str]:
    """Return the arguments of a random layout of a random training."""
    recipe, training = numbers.choice(TRAININGS)
    strategy, layout = numbers.choice(LAYOUTS)
    keys = {**SETTINGS, **training, **layout}
    return [
        f"recipe={recipe}",
        f"strategy={strategy}",
        *(f"{key}={numbers.choice(values)}" for key, values in keys.items()),
        f"seed={numbers.randrange(100)}",
    ]


def prove_layouts(draws: int, seed: int) -> int:
    """Prove random layouts to be the training of one device; print each that is not, and the counts."""
    numbers, verdicts = random.Random(seed), Counter[str]()
    for _ in range(draws):
        command = [sys.executable, "-m", "trainkit", "prove", *drawn(numbers), "--same-cut", "--steps", "4"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
            verdict = {0: "the same", 2: "refused"}.get(done.returncode, "NOT THE SAME")
        except subprocess.TimeoutExpired:
            verdict = "longer than 60 s"
        verdicts[verdict] += 1
        if verdict == "NOT THE SAME":
            print(f"{' '.join(command[3:])}\n{done.stdout}{done.stderr}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return int(verdicts["NOT THE SAME"] > 0)


def line_of(name: str, command: Sequence[str]) -> tuple[str, int]:
    """Run a part; return its line of the table, and its exit code."""
    began, last = time.monotonic(), ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for text in process.stdout or ():
            print(text, end="", flush=True)
            last = text.strip(" =\n") or last
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    where = f"{TODAY} | {commit} | {os.cpu_count()} cores, {platform.machine()}"
    took = f"{(time.monotonic() - began) / 60:.0f} min"
    return f"| {name} | {process.returncode} | {last.replace('|', '/')} | {took} | {where} |", process.returncode


def write(lines: dict[str, str]) -> None:
    """Write the table: the lines of this night, and the last line of each other part."""
    before = RESULTS.read_text() if RESULTS.exists() else ""
    earlier = dict(re.findall(r"^(?=\| (\w+) \| \d+ )(.*)$", before, re.MULTILINE))
    rows = [row for name in PARTS if (row := lines.get(name) or earlier.get(name))]
    text = "# What the nightly runs found\n\n`python scripts/nightly.py`; the last run of each part.\n\n"
    head = "| part | exit code | its last line | took | date | commit | machine |\n|---|---|---|---|---|---|---|\n"
    RESULTS.write_text(f"{text}{head}" + "".join(f"{row}\n" for row in rows))


def main() -> int:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--draws", type=int, default=200, help="layouts to prove")
    parser.add_argument("--seed", type=int, default=TODAY.toordinal(), help="of layouts and meshes")
    parser.add_argument("--only-layouts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_layouts:
        return prove_layouts(options.draws, options.seed)
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}. There are: {', '.join(PARTS)}.")
    seed = f"--seed={options.seed}"
    drawing = {"layouts": [f"--draws={options.draws}", seed], "meshes": [seed]}
    lines, failed = dict[str, str](), 0
    for name in options.parts or PARTS:
        print(f"=== {name}", flush=True)
        lines[name], code = line_of(name, [*PARTS[name], *drawing.get(name, [])])
        write(lines)
        failed |= int(code != 0)
    return failed


if __name__ == "__main__":
    sys.exit(main())
