"""Edits that change no training, of a model of one's own, by the command line and its JSON alone: A must stay A.

python benchmarks/null_edits.py [--edits 100] [--seed 0] [--epochs 40]

`trainkit init` writes a package, and `trainkit compare` trains A, its model as it is, with two seeds. Each edit is made
to the package or to the command, compared with the runs of A, and taken back. The table counts the answers by kind:
*the same* (nothing was run) or *the same bits* (it was run, and all weights have equal hashes). An edit of the kind
"killed" is stopped by SIGKILL once a run has a checkpoint, and the same command continues it. Exits with 1 for any
other answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.night import trainkit

PACKAGE: Final = "own"
MODEL, RECIPE = Path(PACKAGE, "model.py"), Path("conf/recipe/spirals.yaml")
OPTIONS: Final = ("--config-dir", "conf", "--allow-package", PACKAGE, "--json")
Edit = Callable[[int, str], str]
"""Number of the edit, and the text of a file -> its new text."""

SOURCES: Final[dict[str, Edit]] = {
    "comment": lambda number, text: text.replace("class ", f"# Note {number}\nclass ", 1),
    "blank lines": lambda number, text: text.replace("    def ", "\n" * (1 + number % 5) + "    def "),
    "docstring": lambda number, text: text.replace("Score points", f"In version {number}, score points", 1),
    "layer renamed": lambda number, text: text.replace("self.layers", f"self.stack_{number}"),
    "variable renamed": lambda number, text: text.replace("scores", f"found_{number}"),
    "killed": lambda number, text: text.replace("scores", f"resumed_{number}"),
}
"""Kind -> edit of the model's module."""
COMMANDS: Final = {
    "placement": ("strategy=mirrored strategy.replicas=2", "strategy=mirrored strategy.replicas=4"),
    "equal override": ("optimizer.lr=0.01", "batch.global_size=64", "model.width=64", "optimizer=adamw"),
}
"""Kind -> overrides of B."""
KINDS: Final = (*SOURCES, *COMMANDS, "order of keys")


def reordered(number: int, text: str) -> str:
    """Return a recipe with the keys below its defaults in another order, also those within braces."""
    head, name, tail = text.partition("name: ")
    lines = [line for line in (name + tail).splitlines() if not line.startswith("#")]
    random.Random(number).shuffle(lines)
    pairs = [line.partition("{") for line in lines]
    turned = [f"{key}{{{', '.join(reversed(keys.rstrip('}').split(', ')))}}}" for key, brace, keys in pairs if brace]
    return head + "\n".join([*(key for key, brace, _ in pairs if not brace), *turned]) + "\n"


@contextmanager
def edited(path: Path, edit: Callable[[str], str]) -> Any:
    """Change a file for the duration of the block."""
    before = path.read_text()
    path.write_text(edit(before))
    assert path.read_text() != before
    try:
        yield
    finally:
        path.write_text(before)


def killed(arguments: tuple[str, ...]) -> bool:
    """Start a command, and kill it once a new run has a checkpoint and no result; return whether it was in time."""
    existing = {*Path("outputs").rglob("manifest.json")}
    process = subprocess.Popen([sys.executable, "-m", "trainkit", *arguments], stdout=subprocess.DEVNULL)
    while process.poll() is None and not {*Path("outputs/compare").rglob("manifest.json")} - existing:
        time.sleep(0.01)
    if is_in_time := process.poll() is None:
        process.kill()
    process.wait()
    return is_in_time


def main() -> int:
    """Make the edits, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40, help="length of each training")
    options = parser.parse_args()
    kinds = [KINDS[number % len(KINDS)] for number in range(options.edits)]
    random.Random(options.seed).shuffle(kinds)
    answers, wrong, kills, start = defaultdict[str, Counter[str]](Counter), list[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trainkit("init", PACKAGE)
        os.chdir(PACKAGE)
        # Without dropout: the random numbers of a layer are keyed by its name, so that its rename is no null edit.
        shared = [f"epochs={options.epochs}", "model.dropout=0.0", "checkpoint.every_epochs=4"]
        shared += ["recipe=spirals", "quiet=true", "logger=[]"]
        code, printed = trainkit("compare", "", "optimizer.lr=0.02", *shared, "--pairs=2", *OPTIONS)
        if code:
            raise SystemExit(f"A was not trained: exit code {code}")
        a = str(json.loads(printed)["a"]["folder"])
        for number, kind in enumerate(kinds):
            path = RECIPE if kind == "order of keys" else MODEL
            edit = reordered if kind == "order of keys" else SOURCES.get(kind, lambda _, text: f"{text}\n")
            override = COMMANDS[kind][number % len(COMMANDS[kind])].split() if kind in COMMANDS else []
            arguments = ("compare", a, *override, *OPTIONS)
            with edited(path, lambda text, edit=edit, number=number: edit(number, text)):  # type: ignore[misc]
                kills += kind == "killed" and killed(arguments)
                code, printed = trainkit(*arguments)
            comparison = json.loads(printed) if code == 0 else {"answer": f"exit code {code}", "line": printed[-500:]}
            answers[kind][comparison["answer"]] += 1
            sys.stderr.write(f"{time.monotonic() - start:5.0f} s  {number}, {kind}: {comparison['answer']}\n")
            if comparison["answer"] not in ("the same", "the same bits"):
                wrong.append(f"edit {number}, {kind} {' '.join(override)}: {comparison['line']}")
        os.chdir("/")
    print(f"| {options.edits} null edits in {time.monotonic() - start:.0f} s | the same | the same bits | other |")
    print("|---|---:|---:|---:|")
    for kind in KINDS:
        counts = [answers[kind]["the same"], answers[kind]["the same bits"]]
        print(f"| {kind} | {counts[0]} | {counts[1]} | {answers[kind].total() - sum(counts)} |")
    print(f"| killed in the middle of a run | {kills} of {kinds.count('killed')} | | |")
    for line in wrong:
        print(f"BROKEN: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
